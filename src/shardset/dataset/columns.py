"""What a catalog knows of samples, as Arrow columns that expressions are put to: only those that are asked for.

A column of a million samples is made in some milliseconds: from views of the mapped files, and without a Python object
for any sample.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from shardset.index.catalog import Catalog, Group

    Int64s = NDArray[np.int64]

BYTES: Final = "bytes."
"""Stands before the name of a field in the name of the column of its payloads' sizes."""
HAS: Final = "has."
"""Stands before the name of a field in the name of the column that tells which samples have it."""
_CLOSE: Final = 3
_SHOWN: Final = 40
_RIGHT_ANGLE: Final = 4
"""Orientations above this one turn an image on its side (EXIF 2.3, tag 274)."""


class Part(NamedTuple):
    """Some samples of one group.

    Attributes:
        group: The group.
        rows: int64, numbers of samples in it, ascending; None for all.
        first_shard: Number in the dataset of the group's first shard.
        first_sample: Number in the dataset of its first sample.
    """

    group: Group
    rows: Int64s | None
    first_shard: int
    first_sample: int

    def __len__(self) -> int:
        return self.group.files.num_samples if self.rows is None else len(self.rows)

    @property
    def numbers(self) -> Int64s:
        """int64, the numbers of the samples in the dataset."""
        if self.rows is None:
            return np.arange(self.first_sample, self.first_sample + len(self), dtype=np.int64)
        return self.rows + self.first_sample

    def of(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return those of a value for each sample of the group that are of this part."""
        return values if self.rows is None else values[self.rows]

    def column(self, name: str) -> pa.Array:
        """Return a column of the catalog's table of samples, for this part."""
        column = self.group.column(name)
        return column if self.rows is None else column.take(pa.array(self.rows))


def split_parts(catalog: Catalog, numbers: Int64s | None) -> Iterator[Part]:
    """Divide samples (ascending; None for all) by group. Groups without any are left out."""
    starts = catalog.sample_starts
    ends = starts if numbers is None else np.searchsorted(numbers, np.array(starts)).tolist()
    for at, first_sample in enumerate(starts[:-1]):
        if ends[at] == ends[at + 1]:
            continue
        rows = None if numbers is None else numbers[ends[at] : ends[at + 1]] - first_sample
        yield Part(catalog.group(at), rows, catalog.shard_starts[at], first_sample)


def _key(part: Part) -> pa.Array:
    return as_text(part.column("key"))


def _shard(part: Part) -> pa.Array:
    names = as_text(part.group.shards.column("name"))
    return names.take(pa.array(part.of(part.group.shard)))


def _shard_index(part: Part) -> pa.Array:
    return pa.array(part.of(part.group.shard).astype(np.int64) + part.first_shard)


def _sample_index(part: Part) -> pa.Array:
    return pa.array(part.numbers)


def _side(part: Part, name: str, other: str) -> pa.Array:
    """Return a side of the image as it is shown: the other one of what is stored where it is turned on its side."""
    is_turned = pc.greater(part.column("orientation"), _RIGHT_ANGLE)
    return pc.if_else(is_turned, part.column(other), part.column(name)).cast(pa.int64())


def _width(part: Part) -> pa.Array:
    return _side(part, "width", "height")


def _height(part: Part) -> pa.Array:
    return _side(part, "height", "width")


def _aspect(part: Part) -> pa.Array:
    return pc.divide(_width(part).cast(pa.float64()), _height(part).cast(pa.float64()))


def _orientation(part: Part) -> pa.Array:
    return part.column("orientation").cast(pa.int64())


def _caption(part: Part) -> pa.Array:
    return as_text(part.column("caption"))


def _caption_length(part: Part) -> pa.Array:
    return pc.utf8_length(_caption(part)).cast(pa.int64())


def _of_layouts(part: Part, values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return for each sample the value of its layout."""
    part.group.column("fields")  # which looks at the numbers of layouts
    return pa.array(values, kind).take(pa.array(part.of(part.group.layout)))


def _fields(part: Part) -> pa.Array:
    texts = [
        None
        if layout.is_record
        else "/".join(layout.fields).encode("utf-8", "surrogateescape").decode(errors="replace")
        for layout in part.group.layouts
    ]
    return _of_layouts(part, texts, pa.string())


def _num_fields(part: Part) -> pa.Array:
    counts = [None if layout.is_record else len(layout.positions) for layout in part.group.layouts]
    return _of_layouts(part, counts, pa.int64())


def _bytes(part: Part) -> pa.Array:
    group = part.group
    group.column("members")  # which looks at the numbers that the next line goes by
    ends = np.concatenate([[0], np.cumsum(group.length, dtype=np.int64)])
    if part.rows is None:
        return pa.array(np.diff(ends[group.first]))
    return pa.array(ends[group.first[part.rows + 1]] - ends[group.first[part.rows]])


def _has_field(part: Part, field: str) -> pa.Array:
    has = [None if layout.is_record else field in layout.positions for layout in part.group.layouts]
    return _of_layouts(part, has, pa.bool_())


def _field_bytes(part: Part, field: str) -> pa.Array:
    group = part.group
    group.column("members"), group.column("fields")
    layout, first = part.of(group.layout), part.of(group.first[:-1])
    places = [[at for at, name in enumerate(layout.fields) if name == field] for layout in group.layouts]
    sizes = np.zeros(len(layout), np.int64)
    for which in range(max(map(len, places), default=0)):  # once, but for those that have the field twice
        place = np.array([at[which] if which < len(at) else -1 for at in places])[layout]
        at = np.flatnonzero(place >= 0)
        sizes[at] += group.length[first[at] + place[at]]
    is_record = None if group.record_layout < 0 else layout == group.record_layout
    return pa.array(sizes, mask=is_record)


class _Column(NamedTuple):
    """One column: its type, how it is made, and what a catalog must have been made with to have it."""

    kind: pa.DataType
    make: Callable[[Part], pa.Array]
    needs: str = ""


_COLUMNS: Final = {
    "key": _Column(pa.string(), _key),
    "shard": _Column(pa.string(), _shard),
    "shard_index": _Column(pa.int64(), _shard_index),
    "sample_index": _Column(pa.int64(), _sample_index),
    "width": _Column(pa.int64(), _width, "geometry"),
    "height": _Column(pa.int64(), _height, "geometry"),
    "aspect": _Column(pa.float64(), _aspect, "geometry"),
    "orientation": _Column(pa.int64(), _orientation, "geometry"),
    "caption": _Column(pa.string(), _caption, "captions"),
    "caption_length": _Column(pa.int64(), _caption_length, "captions"),
    "fields": _Column(pa.string(), _fields),
    "num_fields": _Column(pa.int64(), _num_fields),
    "bytes": _Column(pa.int64(), _bytes),
}


def column_types(catalog: Catalog) -> dict[str, pa.DataType]:
    """Return the types of all columns of a catalog, by name."""
    types = {name: column.kind for name, column in _COLUMNS.items()}
    for field in sorted(known_fields(catalog)):
        types[HAS + field] = pa.bool_()
        types[BYTES + field] = pa.int64()
    return types


def known_fields(catalog: Catalog) -> set[str]:
    """Return every field that some sample has."""
    groups = map(catalog.group, range(catalog.num_groups))
    layouts = (layout for group in groups for layout in group.layouts if not layout.is_record)
    return {field for layout in layouts for field in layout.fields}


def make_column(part: Part, name: str) -> pa.Array:
    """Return a column of the catalog, a value for each sample of a part."""
    if name in _COLUMNS:
        return _COLUMNS[name].make(part)
    if name.startswith(HAS):
        return _has_field(part, name.removeprefix(HAS))
    return _field_bytes(part, name.removeprefix(BYTES))


def check_known(catalog: Catalog, name: str) -> None:
    """Refuse a column that the catalog was made without.

    Raises:
        ValueError: It is one of pixel sizes or captions, and the catalog has none of these.
    """
    needs = _COLUMNS[name].needs if name in _COLUMNS else ""
    if not needs or getattr(catalog.manifest, needs):
        return
    what = "the pixel sizes of images" if needs == "geometry" else "captions"
    raise ValueError(
        f"the catalog was made without {what}, which the column {name!r} is of - make it with them "
        f"(shardset index --{needs}, or index_dataset(..., {needs}=True)), and open the dataset again"
    )


def suggest(name: str, known: Collection[str]) -> str:
    """Return a phrase with the names that are close to one that is unknown; empty if none is."""
    near = get_close_matches(name, list(known), _CLOSE)
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


def listed(names: Iterable[str]) -> str:
    """Return the first names of a list, which may be long, as text."""
    shown = list(names)
    return ", ".join(shown[:_SHOWN]) + (f", ... ({len(shown)} in all)" if len(shown) > _SHOWN else "")


def as_text(array: pa.Array) -> pa.Array:
    """Return names as text. A catalog has them as bytes where one is not UTF-8; what is no text becomes U+FFFD."""
    if not pa.types.is_binary(array.type):
        return array
    return pa.array([raw and raw.decode("utf-8", "replace") for raw in array.to_pylist()], pa.string())


# ---- expressions


_ROW: Final = "\0row"
_MISSING: Final = re.compile(r"FieldRef\.(?:Nested\(FieldRef\.)?Name\((.*?)\)(?: in | FieldRef\.)", re.DOTALL)
_BY_NUMBER: Final = re.compile(r"FieldPath\(\d")
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
STOPPED: Final = (MemoryError, pa.ArrowCancelled)
"""Errors of Arrow that are no fault of an expression."""
_SHOWN_TEXT: Final = 200
_ADVICE: Final = (
    (
        r"not in range: .* to 9223372036854775807$",
        'numbers from 2**63 on go with uint64 alone: pc.field({0}).cast("uint64"), and pa.scalar(5, "uint64") for a 5',
    ),
    (r"not in range", 'take a type that holds all values: pc.field({0}).cast("int64"), or "float64"'),
    (r"(?i)time ?zone '", 'names of time zones are as "UTC" and "Europe/Berlin"'),
    (r"(?i)time ?zone", 'give both a time zone, or neither: pc.assume_timezone(pc.field({0}), "UTC")'),
    (r"out of bounds timestamp", 'take a coarser unit, for both: pc.field({0}).cast("timestamp[s]", safe=False)'),
    (
        r"types \(.*(timestamp|date\d|time\d)",
        'compare times with times: datetime.datetime(2024, 1, 1), or pa.scalar("2024-01-01").cast("timestamp[s]")',
    ),
    (r"types \(.*(run_end|view|extension|halffloat)", "cast the column of the table before it is joined"),
    (
        r"no kernel matching|values? set|Unsupported cast|key_type",
        "give a value of the column's type, or cast the column, as pc.field({0}).cast({1})",
    ),
    (r"[Ii]nvalid regular expression", "patterns are those of RE2; what stands for itself has a backslash: '\\('"),
    (r"No function registered", "its functions are those of pyarrow.compute"),
    (
        r"non-scalar|MetaFunction",
        "what looks at many samples at once, such as a sum or a rank, is for numpy: ds.select().column({0})",
    ),
    (r"truncated|would lose data", 'say how it is rounded: pc.field({0}).cast("int64", safe=False)'),
    (r"overflow", 'compute with real numbers: pc.field({0}).cast("float64")'),
    (r"No match for FieldRef\.Nested", "the column has no such part"),
)
"""What to do about what Arrow says; {0} is the name of a column, {1} a type that is not its own."""
_OTHERWISE: Final = (
    "select those that it can be computed of first, and then of these; or compute with numpy, and select by number: "
    'pc.field("sample_index").isin(numbers)'
)
_OF_FIELD: Final = re.compile(rf"(?<![\w.])(?:{re.escape(HAS)}|{re.escape(BYTES)})[^\s(),]+")


def used_columns(where: pc.Expression, types: Mapping[str, pa.DataType]) -> list[str]:
    """Find out which columns an expression uses, and whether it gives true or false.

    An expression does not tell what it uses. But its text has the names as they are, and of those that the text has it
    uses those without which it does not fit a table.

    Args:
        where: The expression.
        types: The types of the columns that there are, by name.

    Raises:
        ValueError: It uses a column that is not there, or one by its number; or its types do not fit.
    """
    text = str(where)
    if _BY_NUMBER.search(_QUOTED.sub("", text)):
        raise ValueError(f"columns are named, not numbered: {shown(where)}")
    named = {name: kind for name, kind in types.items() if name in text}
    for name in _OF_FIELD.findall(text):
        named.setdefault(name, pa.bool_() if name.startswith(HAS) else pa.int64())
    try:
        kind = _type_of(where, named)
    except STOPPED:
        raise
    except pa.ArrowException as error:
        missing = _MISSING.search(str(error))
        if missing and missing[1] not in named:
            names = [name for name in types if not _OF_FIELD.fullmatch(name)]
            what = f"there is no column {missing[1]!r}{suggest(missing[1], types)} - there are {listed(names)}"
            fields = [name.removeprefix(HAS) for name in types if name.startswith(HAS)]
            raise ValueError(f"{what}, and {HAS}F and {BYTES}F for each field F: {listed(fields)}") from error
        raise misfit(where, named, error, "does not fit the columns") from error
    if not pa.types.is_boolean(kind) and not pa.types.is_null(kind):
        raise ValueError(
            f"the expression {shown(where)} gives {kind}, and not true or false: compare it with something"
        )
    return [name for name in named if not _fits(where, {other: named[other] for other in named if other != name})]


def misfit(
    where: pc.Expression, types: Mapping[str, pa.DataType], error: pa.ArrowException, verdict: str
) -> ValueError:
    """Return the error to raise where an expression does not fit columns: it names these, and says what to do.

    Args:
        where: The expression.
        types: The types of the columns that it may use, by name.
        error: What Arrow said.
        verdict: What is said of the expression, with the columns behind it.
    """
    said = " ".join(str(error).partition(" in " if "No match for" in str(error) else "\n")[0].split())
    # Without a column that matters Arrow complains of that instead.
    names = [
        name
        for name in types
        if (missing := _MISSING.search(_complaint(where, {other: types[other] for other in types if other != name})))
        and missing[1] == name
    ]
    concerned = " and ".join(f"{name!r} ({types[name]})" for name in names[:_CLOSE]) or "no column"
    advice = next((text for pattern, text in _ADVICE if re.search(pattern, said)), _OTHERWISE)
    what = f"the expression {shown(where)} {verdict} {concerned}: {said}"
    name = names[0] if names else "NAME"
    other = "int64" if types.get(name) in {pa.string(), pa.large_string()} else "string"
    return ValueError(f"{what} - {advice.format(repr(name), repr(other))}")


def _complaint(where: pc.Expression, types: Mapping[str, pa.DataType]) -> str:
    try:
        _type_of(where, types)
    except STOPPED:
        raise
    except pa.ArrowException as error:
        return str(error)
    return ""


def shown(where: pc.Expression) -> str:
    """Return an expression as text for messages: its beginning, if it is long."""
    text = " ".join(str(where).split())
    return text if len(text) <= _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]}..."


def _fits(where: pc.Expression, types: Mapping[str, pa.DataType]) -> bool:
    return not _complaint(where, types)


def _type_of(where: pc.Expression, types: Mapping[str, pa.DataType]) -> pa.DataType:
    """Return the type of what an expression gives for a table with these columns."""
    return evaluate(where, {name: pa.array([], kind) for name, kind in types.items()}, 0).type


def evaluate(where: pc.Expression, columns: Mapping[str, pa.Array | pa.ChunkedArray], count: int) -> pa.ChunkedArray:
    """Return the value of an expression for each of `count` rows of some columns, in order.

    Raises:
        pa.ArrowException: The expression does not fit, or some value cannot be computed.
    """
    from pyarrow import acero  # noqa: PLC0415 - takes a while to load

    row = pa.array(np.arange(count, dtype=np.int64))
    source = acero.TableSourceNodeOptions(pa.table({**columns, _ROW: row}))
    project = acero.ProjectNodeOptions([where, pc.field(_ROW)], ["value", "row"])
    plan = acero.Declaration.from_sequence(
        [acero.Declaration("table_source", source), acero.Declaration("project", project)]
    )
    answer = plan.to_table(use_threads=False)
    if not answer.column("row").equals(pa.chunked_array([row])):  # Arrow promises no order
        answer = answer.sort_by("row")
    return answer.column("value")
