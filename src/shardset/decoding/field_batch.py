"""One field of a batch: what all of its kinds can do, the plain kind, and when values become one array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from shardset.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

BUFFERS: Final = (bytes, bytearray, memoryview)
"""What payloads come as."""


class FieldBatch(Protocol):
    """One field of a batch, filled place by place, by any thread: no two at a time for one place."""

    def decode(self, place: int, payload: Any, seed: int) -> None:
        """Decode a payload into a place.

        Args:
            place: In ``[0, n)``. It may have been filled before, or failed.
            payload: The one that the batch was begun with for this place, or another one, whose shape may differ.
            seed: Decides what is left to chance, such as where an image is cut.

        Raises:
            MissingExtraError: A package that is needed is not installed.
            Exception: Whatever else decoders raise: this payload cannot be decoded.
        """

    def put(self, place: int, value: Any) -> None:
        """Put a ready value into a place."""

    def value(self, place: int) -> Any:
        """Return what is in a place; it may be a view of what `finish` returns."""

    def finish(self) -> Any:
        """Return all values, when each place has been filled: an array or a list, as `stack` says."""


class ValueBatch:
    """Values of any kind, each by a function of (payload, seed)."""

    def __init__(self, count: int, decode: Callable[[Any, int], Any]) -> None:
        self._decode = decode
        self._values: list[Any] = [None] * count

    def decode(self, place: int, payload: Any, seed: int) -> None:
        """As `FieldBatch.decode`."""
        self._values[place] = self._decode(payload, seed)

    def put(self, place: int, value: Any) -> None:
        """As `FieldBatch.put`."""
        self._values[place] = value

    def value(self, place: int) -> Any:
        """As `FieldBatch.value`."""
        return self._values[place]

    def finish(self) -> Any:
        """As `FieldBatch.finish`."""
        return stack(self._values)


def payload_of(value: Any) -> bytes | bytearray | memoryview | None:
    """Return the payload that a value is, or the one that a feature of a record has as its only value; else None."""
    if type(value) is list and len(value) == 1:
        value = value[0]
    return value if isinstance(value, BUFFERS) else None


def not_a_payload(value: Any) -> DecodeError:
    """Return the error to raise for a value that is no payload where one is needed."""
    if isinstance(value, list):
        what = f"{len(value)} values"
    else:
        what = "nothing (None)" if value is None else f"a value of type {type(value).__name__}"
    return DecodeError(f"it holds {what}, where one payload is expected")


def stack(values: list[Any]) -> NDArray[Any] | list[Any]:
    """Return values of one kind as one array, others as the list that they are in.

    Arrays of one shape and one type are stacked along a new first axis. Of Python's numbers, int give int64, float and
    float with int give float64, bool give bool; as long as each value is kept exactly.
    """
    kinds = frozenset(map(type, values))
    if kinds == {np.ndarray}:
        first = values[0]
        is_alike = all(each.shape == first.shape and each.dtype == first.dtype for each in values)
        return np.stack(values) if is_alike else values
    if len(kinds) == 1 and issubclass(next(iter(kinds)), np.generic):
        return np.array(values)
    dtype = _NUMBERS.get(kinds)
    if dtype is None:
        return values
    try:
        array = np.array(values, dtype)
    except OverflowError:
        return values
    return (
        array if len(kinds) == 1 or all(type(each) is float or int(float(each)) == each for each in values) else values
    )


_NUMBERS: Final[dict[frozenset[type], type[np.generic]]] = {
    frozenset((bool,)): np.bool_,
    frozenset((int,)): np.int64,
    frozenset((float,)): np.float64,
    frozenset((int, float)): np.float64,
}
