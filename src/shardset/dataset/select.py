"""Some of the samples of a dataset, chosen by what its catalog and the tables beside it say of them."""

from __future__ import annotations

import hashlib
import logging
import operator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardset.errors import SampleError
from shardset.policy import Place

from .columns import (
    BYTES,
    HAS,
    STOPPED,
    check_known,
    column_types,
    evaluate,
    known_fields,
    listed,
    make_column,
    misfit,
    shown,
    split_parts,
    suggest,
    used_columns,
)
from .joined import join_table
from .views import Bucketed, Buckets, Pack, Packed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from shardset.index.catalog import Catalog

    from .columns import Part
    from .dataset import Dataset
    from .joined import Joined
    from .sample import Sample

    Int64s = NDArray[np.int64]

logger = logging.getLogger(__name__)

_JOINED: Final = "joined."
"""Stands before the name of a joined column that the catalog has one of too."""
_PLACES: Final = 8
_AT_ONCE: Final = 256
_RAISE: Final = object()


def has_field(field: str) -> pc.Expression:
    """Return an expression that is true of samples that have a field: ``ds.select(has_field("txt"))``.

    It is the column ``"has.txt"``; of a record of a TFRecord shard, whose features no catalog knows, it is null.

    Args:
        field: The field, in whatever case.
    """
    return pc.field(HAS + field.lower())


class Selection:
    """Some or all samples of a dataset, in its order. Made by ``ds.select``; it never changes.

    ``len(selection)`` counts its samples, ``selection[i]`` gives one, a slice gives a list of them, and iteration gives
    all. Places in a selection count from 0; numbers of samples are those of the dataset (``ds[number]``). Handed to
    another process, it is the numbers, and the path of the dataset's catalog.
    """

    __slots__ = ("_dataset", "_digest", "_joined", "_numbers")

    def __init__(self, dataset: Dataset, numbers: Int64s | None = None, joined: tuple[Joined, ...] = ()) -> None:
        self._dataset = dataset
        self._numbers = numbers
        self._joined = joined
        self._digest: str | None = "" if numbers is None else None
        if numbers is not None:
            numbers.flags.writeable = False

    @property
    def dataset(self) -> Dataset:
        """The dataset that the samples are of."""
        return self._dataset

    @property
    def numbers(self) -> Int64s | None:
        """int64, the numbers of the samples in their dataset, ascending and not to be written to; None for all."""
        return self._numbers

    @property
    def digest(self) -> str:
        """What tells the selected numbers from any others: 16 hex digits; ``""`` if all samples are selected.

        They are the first of the SHA-256 of the numbers as 64-bit integers, least significant byte first.
        """
        if self._digest is None:
            numbers = np.ascontiguousarray(self._numbers, "<i8")
            self._digest = hashlib.sha256(numbers.data).hexdigest()[:16]
        return self._digest

    @property
    def total_bytes(self) -> int:
        """Bytes: of the payloads of the selected samples; of the shards as they lie there if all are selected."""
        catalog = self._dataset.catalog
        if self._numbers is None:
            return sum(int(catalog.group(number).shard_sizes.sum()) for number in range(catalog.num_groups))
        return int(self.column("bytes").sum())

    def among_first(self, samples: int) -> Selection:
        """Return those that are among the first `samples` of the dataset: what was selected before others came after.

        Its digest is that which the selection had when the dataset was no longer than that.

        Raises:
            ValueError: `samples` is negative, or more than the dataset has.
        """
        count = len(self._dataset)
        if not 0 <= samples <= count:
            raise ValueError(f"the first {samples} samples of a dataset of {count}")
        if samples == count:
            return self
        numbers = self._numbers
        kept = np.arange(samples, dtype=np.int64) if numbers is None else numbers[: np.searchsorted(numbers, samples)]
        first = Selection(self._dataset, kept, self._joined)
        if len(kept) == samples:
            first._digest = ""
        return first

    def numbers_at(self, places: Int64s) -> Int64s:
        """Return the numbers in the dataset of the samples at some places of the selection.

        Raises:
            IndexError: There is no such place.
        """
        if len(places) and (int(places.min()) < 0 or int(places.max()) >= len(self)):
            raise IndexError(f"places {places.min()} to {places.max()} of a selection of {len(self)} samples")
        return places if self._numbers is None else self._numbers[places]

    def __len__(self) -> int:
        return len(self._dataset) if self._numbers is None else len(self._numbers)

    @overload
    def __getitem__(self, place: int) -> Sample: ...

    @overload
    def __getitem__(self, place: slice) -> list[Sample]: ...

    def __getitem__(self, place: int | slice) -> Sample | list[Sample]:
        if isinstance(place, slice):
            if self._numbers is None:
                return self._dataset[place]
            return [self._dataset[number] for number in self._numbers[place].tolist()]
        at, count = operator.index(place), len(self)
        if not -count <= at < count:
            raise IndexError(f"sample {at} of a selection of {count}")
        return self._dataset[at % count if self._numbers is None else int(self._numbers[at])]

    def __iter__(self) -> Iterator[Sample]:
        if self._numbers is None:
            yield from self._dataset
        else:
            for start in range(0, len(self._numbers), _AT_ONCE):
                for number in self._numbers[start : start + _AT_ONCE].tolist():
                    yield self._dataset[number]

    def iter_dicts(self, fields: Sequence[str] | None = None, *, copy: bool = True) -> Iterator[dict[str, Any]]:
        """Read the samples in order, each as a dict of field to payload, as `Dataset.iter_dicts` does.

        Args:
            fields: Read only these.
            copy: Give bytes, otherwise views.

        Raises:
            As `Dataset.iter_dicts`.
        """
        if self._numbers is None:
            yield from self._dataset.iter_dicts(fields, copy=copy)
            return
        for start in range(0, len(self._numbers), _AT_ONCE):
            numbers = self._numbers[start : start + _AT_ONCE]
            for sample in self._dataset.read_samples(numbers, fields, copy=copy):
                if sample is not None:
                    yield sample

    def column(self, name: str, *, default: Any = _RAISE) -> NDArray[Any]:
        """Return a column of the catalog or of a joined table, a value for each selected sample, in their order.

        Args:
            name: Its name, as in an expression.
            default: Stands for values that are not known; by default these raise.

        Returns:
            int64 for integers, float64 for other numbers, bool, datetime64 or timedelta64; else an array of objects.

        Raises:
            ValueError: There is no such column, or the catalog was made without it; or it has values that arrays of
                these types do not hold, such as integers from 2**63 on.
            SampleError: A value is not known, and there is no default.
        """
        catalog, columns = self._dataset.catalog, self._columns()
        if name not in columns:
            raise ValueError(f"there is no column {name!r}{suggest(name, columns)} - there are {listed(columns)}")
        check_known(catalog, name)
        column = columns[name]
        pieces = [column.values(catalog, part) for part in split_parts(catalog, self._numbers)]
        values = pa.chunked_array([chunk for piece in pieces for chunk in _chunks(piece)], column.kind)
        if values.null_count and default is _RAISE:
            is_null = values.is_null().to_numpy()
            sample = self[int(np.argmax(is_null))]
            raise SampleError(
                f"the column {name!r} has no value for sample {sample.key!r}, and for {int(is_null.sum())} in all",
                shard=sample.shard,
                key=sample.key,
                hint=f"leave them out: select(pc.field({name!r}).is_valid()); or give a default",
            )
        try:
            return _filled(values, default) if values.null_count else _as_numpy(values)
        except pa.ArrowException as error:
            what = f"the column {name!r} ({column.kind}) cannot be given as an array: {error}"
            raise ValueError(f'{what} - cast it before it is joined, as table[{name!r}].cast("string")') from error

    def select(
        self, where: pc.Expression | None = None, *, columns: Any = None, on: str | Sequence[str] = "key"
    ) -> Selection:
        """Return those of the samples that an expression is true of.

        The expression may use the columns ``key, shard, shard_index, sample_index, width, height, aspect, orientation,
        caption, caption_length, fields, num_fields, bytes``, for each field such as ``txt`` also ``bytes.txt`` and
        ``has.txt``, and those of joined tables. docs/selecting.md says what they are. Where it is neither true nor
        false, since a value is not known, the sample is left out, and counted in the dataset's report
        (``unknown_value``).

        Args:
            where: An expression, as ``pc.field("width") >= 512`` (``import pyarrow.compute as pc``); None for all.
            columns: A table with more columns, which stay joined to what is returned: a ``pyarrow.Table``, or what
                ``pyarrow.table`` makes one of; or the path or url of a Parquet or Arrow (Feather) file, or a list of
                these. Samples without a row have nulls; they are counted (``no_row``), and so are rows that are no
                sample's (``unmatched_row``).
            on: What the table is joined by: ``"key"``, ``["shard", "key"]`` (a shard's name is as in the column
                ``shard``), or ``"sample_index"``. Samples that share a key get the same row.

        Raises:
            ValueError: The expression uses a column that is not there, or that the catalog was made without, or does
                not fit its columns; or the table lacks what it is joined by, or has two rows for one sample.
            TypeError: `where` is no expression, or `columns` no table.
            StorageError: A file of the table cannot be read.
        """
        view = self if columns is None else self._join(join_table(columns, on))
        if where is None:
            return view
        if not isinstance(where, pc.Expression):
            raise TypeError(
                f"where is a pyarrow expression such as pc.field('width') >= 512, not {type(where).__name__}; "
                "to select by number: pc.field('sample_index').isin(numbers)"
            )
        return view._narrow(where)  # noqa: SLF001 - another selection

    def bucketed(self, buckets: Buckets) -> Bucketed:
        """Have the samples given in batches of one image size.

        Raises:
            ValueError: The catalog was made without the pixel sizes of images.
        """
        check_known(self._dataset.catalog, "width")
        return Bucketed(self, buckets)

    def packed(self, pack: Pack) -> Packed:
        """Have the samples given in packs of limited length.

        Raises:
            ValueError: There is no such column as the pack names.
        """
        columns = self._columns()
        if pack.length not in columns:
            what = f"there is no column {pack.length!r}{suggest(pack.length, columns)}"
            raise ValueError(f"{what} - join a table that has it: select(columns=...)")
        kind = columns[pack.length].kind
        if not pa.types.is_integer(kind) and not pa.types.is_floating(kind):
            raise ValueError(f"the column {pack.length!r} is of {kind}, and lengths are numbers")
        check_known(self._dataset.catalog, pack.length)
        return Packed(self, pack)

    def _columns(self) -> dict[str, _Column]:
        """Return all columns by name: the catalog's, and those of joined tables."""
        columns = known = {name: _Column(kind, name) for name, kind in column_types(self._dataset.catalog).items()}
        for joined in self._joined:
            more = {_joined_name(name, known): _Column(kind, name, joined) for name, kind in joined.types.items()}
            columns = columns | more
        return columns

    def _join(self, joined: Joined) -> Selection:
        catalog, report = self._dataset.catalog, self._dataset.report
        known, there = column_types(catalog), self._columns()
        for name in joined.types:
            renamed = _joined_name(name, known)
            if renamed in there:
                raise ValueError(f"a table with a column {name!r} is joined already - rename or drop one of the two")
            if renamed != name:
                what = f"{name!r} is the catalog's column; that of the table is {renamed!r}"
                report.add("shadowed_column", Place(message=what))
        rows, unmatched = joined.rows(catalog), joined.unmatched(catalog)
        for row in unmatched[:_PLACES].tolist():
            what = f"row {row} of the table is no sample's: {' and '.join(joined.on)} {joined.row_name(row)}"
            report.add("unmatched_row", Place(message=what))
        if len(unmatched) > _PLACES:
            report.add("unmatched_row", count=len(unmatched) - _PLACES)
        missing = np.flatnonzero((rows if self._numbers is None else rows[self._numbers]) < 0)
        numbers = missing if self._numbers is None else self._numbers[missing]
        self._count("no_row", numbers, "the table has no row for it")
        return Selection(self._dataset, self._numbers, (*self._joined, joined))

    def _narrow(self, where: pc.Expression) -> Selection:
        """Return those samples that an expression is true of."""
        catalog, columns = self._dataset.catalog, self._columns()
        used = used_columns(where, {name: column.kind for name, column in columns.items()})
        for name in used:
            check_known(catalog, name)
            if name not in columns:
                columns[name] = _Column(pa.null(), name)
                self._count_no_field(name.partition(".")[2])
        found, unknown = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for part in split_parts(catalog, self._numbers):
            values = {name: columns[name].values(catalog, part) for name in used}
            try:
                answer = evaluate(where, values, len(part))
            except STOPPED:
                raise
            except pa.ArrowException as error:
                kinds = {name: columns[name].kind for name in used}
                raise misfit(where, kinds, error, "cannot be computed of") from error
            numbers = part.numbers
            if answer.null_count:
                unknown.append(numbers[answer.is_null().to_numpy()])
                answer = pc.fill_null(answer.cast(pa.bool_()), fill_value=False)
            found.append(numbers[answer.to_numpy()])
        self._count("unknown_value", np.concatenate(unknown), f"neither true nor false: {shown(where)}")
        selected = np.concatenate(found)
        return Selection(self._dataset, None if len(selected) == len(self._dataset) else selected, self._joined)

    def _count_no_field(self, field: str) -> None:
        fields = known_fields(self._dataset.catalog)
        what = f"no sample has a field {field!r}{suggest(field, fields)}"
        self._dataset.report.add("no_such_field", Place(self._dataset.name, message=what))
        logger.warning("%s", what)

    def _count(self, code: str, numbers: Int64s, message: str) -> None:
        """Count samples in the dataset's report, and name the first of them."""
        report = self._dataset.report
        for number in numbers[:_PLACES].tolist():
            sample = self._dataset[number]
            report.add(code, Place(sample.shard, key=sample.key, message=message))
        if len(numbers) > _PLACES:
            report.add(code, count=len(numbers) - _PLACES)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Selection):
            return NotImplemented
        ours, theirs = self._dataset, other._dataset
        if ours is not theirs and ours.catalog.manifest.groups != theirs.catalog.manifest.groups:
            return False
        if self._numbers is None or other._numbers is None:
            return self._numbers is other._numbers
        return np.array_equal(self._numbers, other._numbers)

    def __hash__(self) -> int:
        return hash((len(self), self.digest))

    def __repr__(self) -> str:
        tables = f", joined={len(self._joined)}" if self._joined else ""
        return f"Selection({self._dataset.name!r}, {len(self)} of {len(self._dataset)} samples{tables})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Selection, (self._dataset, self._numbers, self._joined), (None, {"_digest": self._digest})


class _Column(NamedTuple):
    """A column of a selection: its type, what its table calls it, and that table if it is not the catalog."""

    kind: pa.DataType
    name: str
    joined: Joined | None = None

    def values(self, catalog: Catalog, part: Part) -> pa.Array | pa.ChunkedArray:
        """Return a value for each sample of a part."""
        return make_column(part, self.name) if self.joined is None else self.joined.column(catalog, part, self.name)


def _joined_name(name: str, known: Collection[str]) -> str:
    """Return what the column of a joined table is called: its name, unless the catalog has one of that name."""
    return _JOINED + name if name in known or name.startswith((HAS, BYTES)) else name


def _chunks(values: pa.Array | pa.ChunkedArray) -> list[pa.Array]:
    return values.chunks if isinstance(values, pa.ChunkedArray) else [values]


def _as_numpy(values: pa.ChunkedArray) -> NDArray[Any]:
    """Return a column without nulls as `Selection.column` gives it."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        return _as_numpy(values.cast(kind.value_type))
    if pa.types.is_integer(kind):
        return values.cast(pa.int64()).to_numpy()  # type: ignore[no-any-return]
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return values.cast(pa.float64()).to_numpy()  # type: ignore[no-any-return]
    if pa.types.is_nested(kind) or pa.types.is_interval(kind):  # which Arrow makes no array of, but ends the process
        answer = np.empty(len(values), object)
        answer[:] = values.to_pylist()
        return answer
    return values.to_numpy()  # type: ignore[no-any-return]


def _filled(values: pa.ChunkedArray, default: Any) -> NDArray[Any]:
    """Return a column with a default in the place of nulls."""
    is_null = values.is_null().to_numpy()
    known = _as_numpy(values.drop_null())
    if not len(known) and known.dtype.kind in "iub":
        known = known.astype(np.int64)
    given = np.asarray(default)
    is_number = known.dtype.kind in "iuf" and given.dtype.kind in "iuf"
    kind: Any = known.dtype if given.dtype == known.dtype else np.result_type(known, given) if is_number else object
    answer = np.empty(len(values), kind)
    answer[~is_null] = known
    answer[is_null] = default
    return answer
