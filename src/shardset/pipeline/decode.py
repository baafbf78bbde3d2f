"""Stages that decode: `decode` by handlers and tables, also ahead in threads, and `xdecode` by patterns of names."""

from __future__ import annotations

import io
from contextlib import closing
from fnmatch import fnmatchcase
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from shardset.decoding.registry import decode_text
from shardset.decoding.sample_decoder import SampleDecoder, sample_error
from shardset.errors import DecodeError, MissingExtraError

from .ahead import attempt, calls_ahead
from .passage import Passage
from .run import Arrivals, Step
from .stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from shardset.decoding.handlers import Handler as FieldHandler

    from .run import Handler, Origin

    Pattern = tuple[str, Callable[[Any], Any] | bool]
    """What names look like, as fnmatch has it, and what to do with a stream of their bytes; False for nothing."""


def decode_stage(
    *handlers: FieldHandler | str | SampleDecoder,
    pre: Iterable[FieldHandler] | None = None,
    post: Iterable[FieldHandler] | None = None,
    only: str | Iterable[str] | None = None,
    partial: bool = False,
    threads: int = 0,
    handler: Handler | None = None,
) -> Stage:
    """Return the stage for `decode` with these arguments, which are checked now. It pickles if the handlers do.

    Raises:
        ValueError: A word for images is unknown, or `threads` is negative.
        TypeError: A handler is neither a word nor callable.
    """
    decoder = _decoder(handlers, pre, post, only, partial)
    return Stage(decode, decoder, threads=_checked(threads), handler=handler)


def decode(
    source: Iterable[dict[str, Any]],
    *handlers: FieldHandler | str | SampleDecoder,
    pre: Iterable[FieldHandler] | None = None,
    post: Iterable[FieldHandler] | None = None,
    only: str | Iterable[str] | None = None,
    partial: bool = False,
    threads: int = 0,
    handler: Handler | None = None,
    step: Step | None = None,
) -> Iterator[dict[str, Any]]:
    """Decode the fields of samples.

    A sample with a field that cannot be decoded is an error of the code ``bad_field``.

    Args:
        source: Samples.
        handlers: Functions of (name with its dot, payload) that give a value, or None to leave the field to the next
            one; or words for the form of images, such as ``"pil"`` and ``"rgb8"``. Or one `SampleDecoder` for them
            all.
        pre: Handlers to ask before; None for the one that unpacks ``.gz``.
        post: Handlers to ask after; None for the usual table.
        only: Whole names of the fields to decode, as a list or with spaces between; None for all.
        partial: Leave values that are not bytes as they are, where they would be an error.
        threads: Decode in so many threads, up to 4 samples for each (`ahead.AHEAD`) before they are asked for. Samples
            and errors come in the order of the source all the same. 0 decodes each sample when it is asked for.
        handler: Decides about errors; None leaves it to the policy.
        step: The step of a run.

    Raises:
        ValueError: A word for images is unknown, or `threads` is negative.
        MissingExtraError: A package that is needed is not installed. No handler is asked: it is so for all samples.
    """
    decoder = _decoder(handlers, pre, post, only, partial)
    threads = _checked(threads)
    step = step or Step(name="decode")
    passage = Passage(step)
    with closing(_outcomes(source, decoder, threads, step)) as outcomes:  # ends the threads whatever happens
        for sample, origin, outcome in outcomes:
            step.run.origin = origin
            if isinstance(outcome, dict):
                passage.passed = True
                yield outcome
            elif not isinstance(outcome, DecodeError):
                raise outcome
            elif not passage.settle(outcome, "bad_field", sample, handler):
                break
    passage.finish()


def _decoder(
    handlers: Sequence[FieldHandler | str | SampleDecoder],
    pre: Iterable[FieldHandler] | None,
    post: Iterable[FieldHandler] | None,
    only: str | Iterable[str] | None,
    partial: bool,
) -> SampleDecoder:
    if len(handlers) == 1 and isinstance(handlers[0], SampleDecoder):
        return handlers[0]
    return SampleDecoder(handlers, pre, post, only, partial)  # type: ignore[arg-type] # the one above is no handler


def _checked(threads: int) -> int:
    if threads < 0:
        raise ValueError(f"threads={threads} is below 0")
    return int(threads)


def _outcomes(
    source: Iterable[Any], decoder: SampleDecoder, threads: int, step: Step
) -> Generator[tuple[Any, Origin | None, Any]]:
    """Give each sample with its origin and what became of it: a decoded sample, or an exception."""
    items = iter(source)
    # With threads too, what later stages held has to pass without being held again; and one more sample is decoded
    # here, so that modules are imported by this thread, and not by several at once or while somebody forks.
    here = len(step.held_later) + 1 if threads else None
    arrivals = Arrivals(step)
    if threads:
        step.remember(lambda: {"held": [list(origin) for origin in arrivals.awaited]})
    for sample in islice(items, here):
        arrivals.take()
        yield sample, step.run.origin, attempt(decoder, sample)
    if threads:
        yield from calls_ahead(items, decoder, threads, step, arrivals)


def _read_text(stream: Any) -> str:
    return decode_text(stream.read())


def _read_bytes(stream: Any) -> Any:
    return stream.read()


def _refuse_pickle(_stream: Any) -> Any:
    raise DecodeError(
        "it holds a pickle, and reading one runs any code that it names",
        hint="where the data is trusted, name the function: xdecode(pyd=pickle.load)",
    )


XDECODERS: Final[tuple[Pattern, ...]] = (("*.bin", _read_bytes), ("*.txt", _read_text), ("*.pyd", _refuse_pickle))
"""What `xdecode` knows by itself."""


def find_decoder(decoders: Iterable[Pattern], path: str) -> Callable[[Any], Any] | bool | None:
    """Return the function for a field by patterns, of which later ones win.

    Args:
        decoders: Pairs of a pattern, compared with the lower-case name with and without a dot before it, and a
            function or False.
        path: The field; only what stands after its last slash counts.

    Returns:
        The function; False if the field is to stay as it is, as ``__key__`` and the like do; None if no pattern fits.
    """
    name = path.rpartition("/")[2].lower()
    if name.startswith("__"):
        return False
    for pattern, function in reversed(tuple(decoders)):
        if fnmatchcase(name, pattern) or fnmatchcase("." + name, pattern):
            return function
    return None


def xdecode(
    source: Iterable[dict[str, Any]],
    *args: Pattern,
    must_decode: bool = True,
    defaults: Iterable[Pattern] = XDECODERS,
    handler: Handler | None = None,
    step: Step | None = None,
    **kw: Callable[[Any], Any] | bool,
) -> Iterator[dict[str, Any]]:
    """Decode the fields of samples by patterns of their names, with functions of streams.

    A field that cannot be decoded, or that no pattern fits, is an error of the code ``bad_field``. Pickles are refused
    unless a function is named for them.

    Args:
        source: Samples. Values that are not bytes go to the functions as they are; ``__key__`` and the like stay.
        args: Pairs of a pattern, as fnmatch has it, and a function of a stream, or False to leave a field as it is.
            Later ones win.
        must_decode: Whether a field that no pattern fits is an error; otherwise it stays as it is.
        defaults: Pairs that come before `args`.
        handler: Decides about errors; None leaves it to the policy.
        step: The step of a run.
        **kw: Functions by suffix: ``png=f`` is ``("*.png", f)``. They come last.
    """
    step = step or Step(name="xdecode")
    passage = Passage(step)
    decoders = (*defaults, *args, *((f"*.{suffix}", function) for suffix, function in kw.items()))
    found: dict[str, Callable[[Any], Any] | bool | None] = {}
    for sample in source:
        decoded: dict[str, Any] = {}
        name = ""
        try:
            for name, value in sample.items():
                if name not in found:
                    found[name] = find_decoder(decoders, name)
                decoded[name] = _decode_stream(found[name], value, must_decode=must_decode)
        except MissingExtraError:
            raise
        except Exception as error:  # noqa: BLE001 - settled
            placed = sample_error(error, name, sample)
            placed.__cause__ = error
            if passage.settle(placed, "bad_field", sample, handler):
                continue
            break
        passage.passed = True
        yield decoded
    passage.finish()


def _decode_stream(decoder: Callable[[Any], Any] | bool | None, value: Any, *, must_decode: bool) -> Any:
    if callable(decoder):
        return decoder(io.BytesIO(value) if isinstance(value, bytes) else value)
    if decoder is None and must_decode:
        raise DecodeError("no pattern fits its name", hint="xdecode(..., must_decode=False) leaves such fields alone")
    return value
