"""Processes that decode and map samples, for functions that keep Python busy."""

from __future__ import annotations

from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

from shardset.decoding.batches import BatchDecoder
from shardset.decoding.registry import field_error
from shardset.errors import MissingExtraError, ShardsetError
from shardset.processes import interrupts_held, new_pool, starting, stop_pool

from .batches import apply_maps
from .collation import OWN

if TYPE_CHECKING:
    from shardset.decoding.options import Decode

    from .batches import Map, Sample

_begun: list[tuple[BatchDecoder, tuple[Map, ...]]] = []
"""In a worker: what it does with samples."""


class Workers:
    """A pool of processes for one pass. They end with `close`, and with this process, however that ends.

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
        with starting():
            for _ in range(count):
                self._pool.submit(int)

    def __call__(
        self, samples: list[Sample], kinds: dict[str, str], shape: tuple[int, int] | None
    ) -> list[Sample | Exception]:
        """Decode and map samples in one of the processes.

        Args:
            samples: Payloads by field, and what else is said of each.
            kinds: For each name of a field, the field that it is decoded like.
            shape: Height and width that a bucket asks for.

        Returns:
            What became of each, or why it could not be decoded.

        Raises:
            ShardsetError: The process ended.
            Exception: Whatever a function of `map` raised.
        """
        if not samples:
            return []
        try:
            return self._pool.submit(_carry_out, samples, kinds, shape).result()
        except BrokenProcessPool as error:
            raise ShardsetError(
                "a process that maps samples was killed, or ended by itself",
                hint="go on from the state of the last batch; a lack of memory is the usual reason",
            ) from error

    def close(self) -> None:
        """End the processes. What they are at is given up."""
        with interrupts_held():
            stop_pool(self._pool)


def _begin(decode: Decode | None, maps: tuple[Map, ...]) -> None:
    _begun[:] = [(BatchDecoder(decode), maps)]


def _carry_out(samples: list[Sample], kinds: dict[str, str], shape: tuple[int, int] | None) -> list[Sample | Exception]:
    decoder, maps = _begun[0]
    fields = {
        name: decoder.begin(kind, [sample[name] for sample in samples], shape=shape) for name, kind in kinds.items()
    }
    made: list[Sample | Exception] = []
    for place, sample in enumerate(samples):
        name = ""
        try:
            for name, batch in fields.items():
                batch.decode(place, sample[name], sample["__seed__"])
        except MissingExtraError:
            raise
        except Exception as error:  # noqa: BLE001 - decoders raise anything; the policy decides
            made.append(field_error(error, name))
            continue
        values: dict[str, Any] = {name: batch.value(place) for name, batch in fields.items()}
        made.append(apply_maps(maps, {**values, **{name: sample[name] for name in OWN if name in sample}}))
    return made
