"""Processes that decode and map samples, for functions that keep Python busy."""

from __future__ import annotations

import pickle
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

from shardset.decoding.batches import BatchDecoder
from shardset.decoding.registry import field_error
from shardset.errors import MissingExtraError, ShardsetError
from shardset.processes import interrupts_held, new_pool, starting, stop_pool

from .batches import apply_maps, give_default

if TYPE_CHECKING:
    from shardset.decoding.field_batch import FieldBatch
    from shardset.decoding.options import Decode
    from shardset.errors import DecodeError

    from .batches import Map, Outcome, Sample, Work

_begun: list[tuple[BatchDecoder, tuple[Map, ...]]] = []
"""In a worker: what it does with samples."""


class Workers:
    """A pool of processes. They end when nobody refers to this any more, with `close`, and with this process.

    Args:
        count: How many.
        decode: How fields are decoded.
        maps: What samples are given to then. They must pickle.

    Raises:
        ValueError: A field is to be opened as a file, which no other process can be given.
    """

    def __init__(self, count: int, decode: Decode | None, maps: tuple[Map, ...]) -> None:
        opened = [name for name in (decode.fields if decode else ()) if not BatchDecoder(decode).reads(name)]
        if opened:
            raise ValueError(f"field {opened[0]!r} is opened as a file, which cannot go to another process")
        self._pool = new_pool(count, __package__, _begin, (decode, maps))
        self.is_broken = False
        with starting():
            for _ in range(count):
                self._pool.submit(int)

    def close(self) -> None:
        """End the processes now. What they are at is given up."""
        self.is_broken = True
        with interrupts_held():
            stop_pool(self._pool)

    def __call__(self, work: Work) -> list[Outcome]:
        """Decode and map samples in one of the processes.

        Raises:
            ShardsetError: The process ended.
            Exception: Whatever a function of `map` raised.
        """
        if not work.samples:
            return []
        try:
            return self._pool.submit(_carry_out, work).result()
        except BrokenProcessPool as error:
            self.is_broken = True
            raise ShardsetError(
                "a process that maps samples was killed, ended by itself, or could not begin",
                hint="what it printed last may say why; a lack of memory is the usual reason. The state of the last "
                "batch goes on",
            ) from error


def _begin(decode: Decode | None, maps: tuple[Map, ...]) -> None:
    _begun[:] = [(BatchDecoder(decode), maps)]


def _carry_out(work: Work) -> list[Outcome]:
    decoder, maps = _begun[0]
    fields = {
        name: decoder.begin(kind, [sample.get(name) for sample in work.samples], shape=work.shape)
        for name, kind in work.kinds.items()
    }
    outcomes: list[Outcome] = []
    for place, sample in enumerate(work.samples):
        faults: list[DecodeError] = []
        failed = None
        for name, batch in fields.items():
            failed = _fill(batch, place, sample, name, work.defaults, faults)
            if failed is not None:
                break
        if failed is not None:
            outcomes.append((failed, faults))
            continue
        values: dict[str, Any] = {name: batch.value(place) for name, batch in fields.items()}
        values |= {name: value for name, value in sample.items() if name not in fields}
        try:
            outcomes.append((apply_maps(maps, values), faults))
        except Exception as error:  # noqa: BLE001 - it is raised again
            raise _portable(error) from None
    return outcomes


def _fill(  # noqa: PLR0917 - one call, above
    batch: FieldBatch, place: int, sample: Sample, name: str, defaults: dict[str, Any], faults: list[DecodeError]
) -> DecodeError | None:
    """Decode a field into its place, or put the default for it there; return why neither can be."""
    if name in sample:
        try:
            batch.decode(place, sample[name], sample["__seed__"])
        except MissingExtraError:
            raise
        except Exception as error:  # noqa: BLE001 - decoders raise anything; the policy decides
            fault = field_error(error, name)
            if name not in defaults:
                return fault
            faults.append(fault)
        else:
            return None
    give_default(batch, place, defaults.get(name), sample["__seed__"])
    return None


def _portable(error: Exception) -> Exception:
    """Return an error that another process can have: itself, or what it says."""
    notes = getattr(error, "__notes__", [])
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - of our own making
    except Exception:  # noqa: BLE001 - whatever its class does
        copy = None
    made = error if isinstance(copy, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
    if made is not error:
        for note in notes:
            made.add_note(note)
    return made
