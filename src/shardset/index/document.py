"""Index files as JSON: from their bytes to an object, and back."""

from __future__ import annotations

import gc
import json
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
import orjson

from .sidecar_entries import MalformedError, show

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Buffer

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_LARGE_INTEGER: Final = re.compile(rb"[0-9]{19}")
_LONE_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's collector of cycles from running.

    An index is tens of thousands of small dicts and no cycle among them; looking through them again and again costs a
    third of the time that it takes to read one.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def load_document(payload: Buffer, *, exact: bool = False) -> dict[str, Any]:
    """Return the JSON object that an index file holds.

    Args:
        payload: The file's bytes.
        exact: Keep integers above 64 bits, which otherwise come out as floats.

    Raises:
        MalformedError: The file is no JSON, or no object.
    """
    view = memoryview(payload)
    if bytes(view[:3]) == _BYTE_ORDER_MARK:
        view = view[3:]
    try:
        is_large = exact and _may_have_large_integers(view)
        document = _parse_odd(bytes(view)) if is_large else orjson.loads(view)
    except orjson.JSONDecodeError as error:
        if _LONE_SURROGATE.search(view) is None:
            raise MalformedError(f"the index is not JSON: {error}") from error
        document = _parse_odd(bytes(view))
    if not isinstance(document, dict):
        raise MalformedError(f"the index is {show(document)}, not an object with files")
    return document


def _may_have_large_integers(payload: memoryview) -> bool:
    """Tell whether there are so many digits in a row that they may be an integer above 63 bits."""
    # Of 19 digits in a row, six stand at every third byte; and between two numbers stand mostly three bytes or more.
    run = np.frombuffer(payload, np.uint8)[::3] - np.uint8(ord("0")) < 10
    for further in (1, 2, 2):  # from digits to runs of 2, 4 and 6 of them
        run = run[:-further] & run[further:]
    return bool(run.any()) and _LARGE_INTEGER.search(payload) is not None


def _parse_odd(payload: bytes) -> Any:
    """Read JSON that orjson refuses for its lone surrogates, which Python's own writer makes, or for large integers."""
    try:
        return json.loads(payload.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"the index is not JSON: {error}") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")


def dump_document(document: dict[str, Any], *, indent: bool = False) -> bytes:
    """Return the text of an index file, with a line end: compact, or indented by two.

    Raises:
        TypeError: A value is none of JSON.
        ValueError: A number is not finite, or the value contains itself.
        RecursionError: It is nested too deep.
    """
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    try:
        return orjson.dumps(document, option=option | orjson.OPT_INDENT_2 if indent else option)
    except TypeError:
        # It refuses what it reads all the same: lone surrogates, large integers, more than 254 levels.
        return (to_json(document, indent=indent) + "\n").encode()


def to_json(value: Any, *, indent: bool = False) -> str:
    """Return JSON by Python's own writer, which knows more than orjson and takes longer. Raises as `dump_document`."""
    separators = (",", ": ") if indent else (",", ":")
    return json.dumps(value, indent=2 if indent else None, separators=separators, allow_nan=False, default=_to_float)


def _to_float(value: Any) -> float:
    if isinstance(value, np.float32):
        return float(str(value))  # the shortest decimal that reads back as the same single, as orjson writes it
    raise TypeError(f"a {type(value).__name__} is no JSON value")
