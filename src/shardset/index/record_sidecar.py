"""The sidecar index of a TFRecord shard: a JSON file beside it with the length of each record.

Its keys and what is promised are in docs/formats.md. It also reads and writes the text indexes of DALI and of the
package tfrecord, which are the same: a line ``<offset of the record> <its length with the framing>`` each.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardset.errors import IndexFileError
from shardset.formats.tfrecord import FRAME_SIZE, HEADER_SIZE, RecordTable

from .document import dump_document
from .records import find_gaps, index_from_records, lengths_to_offsets
from .sidecar_entries import MalformedError, check_whole, has_surrogates, show
from .table import RecordForm

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardset.formats.faults import Fault

    from .table import ShardIndex

    Int64s = NDArray[np.int64]

_LONGEST: Final = 1 << 62
_DALI: Final = "make it anew with: shardset index --text-index"


def dump_records(index: ShardIndex, *, name: str, version: int, faults: list[dict[str, Any]]) -> bytes:
    """Return the sidecar index of a TFRecord shard: compact JSON with a line end, the same bytes for the same index."""
    form = index.records
    assert form is not None  # noqa: S101 - the caller has looked
    document: dict[str, Any] = {} if has_surrogates(name) else {"path": name}
    document |= {"filesize": index.size, "format": "tfrecord", "lengths": index.length.tolist()}
    if form.compression:
        document |= {
            "compression": form.compression,
            "content_size": form.size,
            "access_points": base64.b64encode(form.points).decode(),
        }
    if gaps := find_gaps(index):
        document["gaps"] = gaps
    document["shardset"] = {"version": version, "digest": index.digest(), "faults": faults}
    return dump_document(document)


def read_records(document: dict[str, Any], filesize: int, faults: tuple[Fault, ...]) -> ShardIndex:
    """Turn the JSON object of such a file into an index.

    Raises:
        MalformedError: A value is not as it should be, or records reach past the end of the shard.
    """
    lengths, gaps = _lengths(document.get("lengths")), _gaps(document.get("gaps", []))
    compression = document.get("compression", "")
    if not isinstance(compression, str) or compression not in {"", "gzip"}:
        raise MalformedError(f"compression is {show(compression)}")
    size = check_whole("content_size", document.get("content_size"), _LONGEST) if compression else filesize
    try:
        points = base64.b64decode(document.get("access_points", ""), validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise MalformedError("access_points are no base64") from None
    if any(row >= len(lengths) for row, _ in gaps):
        raise MalformedError("a gap is before a record that is not there")
    if gaps and not any(fault.is_error for fault in faults):
        raise MalformedError("there are gaps between records, and no damage that would tell why")
    # As Python's numbers, which do not wrap around.
    if sum(lengths.tolist()) + sum(gap for _, gap in gaps) > size:
        raise MalformedError(f"the records are longer than the shard, which has {size} bytes")
    offsets = lengths_to_offsets(lengths, gaps)
    end = int(offsets[-1] + lengths[-1]) + FRAME_SIZE - HEADER_SIZE if len(lengths) else 0
    if end > size:
        raise MalformedError(f"the records reach to byte {end}, past the end of the shard, which has {size}")
    table = RecordTable(offsets, lengths, end, faults)
    return index_from_records(table, filesize, RecordForm(compression, size, points))


def _lengths(value: Any) -> Int64s:
    if not isinstance(value, list):
        raise MalformedError(f"lengths is {show(value)}, not a list")
    if set(map(type, value)) - {int}:
        wrong = next(item for item in value if type(item) is not int)
        raise MalformedError(f"a length is {show(wrong)}")
    if value and not 0 <= min(value) <= max(value) <= _LONGEST:
        raise MalformedError(f"lengths lie between {min(value)} and {max(value)}")
    return np.array(value, np.int64)


def _gaps(value: Any) -> list[tuple[int, int]]:
    if not isinstance(value, list):
        raise MalformedError(f"gaps is {show(value)}, not a list")
    gaps = []
    for pair in value:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(part) is int for part in pair)):
            raise MalformedError(f"a gap is {show(pair)}")
        row, size = pair
        if row < 0 or not 0 < size <= _LONGEST:
            raise MalformedError(f"a gap is {show(pair)}")
        gaps.append((row, size))
    return gaps


def dump_text_index(index: ShardIndex) -> bytes:
    """Return the text index of a plain TFRecord shard, byte for byte as DALI's and vahidk's ``tfrecord2idx`` write it.

    Raises:
        ValueError: The shard is a tar, or compressed; nobody reads such an index then.
    """
    if index.records is None or index.records.compression:
        raise ValueError("only a plain TFRecord shard has a text index")
    starts, sizes = (index.offset - HEADER_SIZE).tolist(), (index.length + FRAME_SIZE).tolist()
    return "".join([f"{start} {size}\n" for start, size in zip(starts, sizes, strict=True)]).encode()


def parse_text_index(text: bytes, size: int, *, path: str) -> ShardIndex:
    """Read a text index, and check that its records fill a shard of `size` bytes without a gap.

    Raises:
        IndexFileError: It is no such index (that of tfr-reader, which is binary, has the same name), or it is one of
            another shard.
    """
    fields = text.split()
    lines = text.splitlines()
    if len(fields) != 2 * len(lines) or not all(field.isdigit() and len(field) < 19 for field in fields):
        raise IndexFileError("this is no text index of a TFRecord file", path=path, hint=_DALI)
    numbers = np.array(list(map(int, fields)), np.int64).reshape(-1, 2)
    starts, sizes = numbers[:, 0], numbers[:, 1]
    ends = starts + sizes
    wrong = np.flatnonzero((sizes < FRAME_SIZE) | (starts != np.concatenate([[0], ends[:-1]])))
    if len(wrong):
        line = int(wrong[0])
        what = f"line {line + 1} ({starts[line]} {sizes[line]}) does not follow the one before"
        raise IndexFileError(what, path=path, hint=_DALI)
    end = int(ends[-1]) if len(ends) else 0
    if end != size:
        what = f"the index is of a file of {end} bytes, this one has {size}"
        raise IndexFileError(what, path=path, hint=_DALI)
    table = RecordTable(starts + HEADER_SIZE, sizes - FRAME_SIZE, end, ())
    return index_from_records(table, size, RecordForm("", size))
