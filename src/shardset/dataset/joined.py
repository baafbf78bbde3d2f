"""Columns of a table beside a dataset, joined to its samples by their keys or numbers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardset.errors import ChangedError, without_secrets
from shardset.storage.anywhere import AnyStore
from shardset.storage.local import local_path
from shardset.storage.store import url_scheme

from .columns import listed
from .payload_file import open_payload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardset.index.catalog import Catalog
    from shardset.storage.store import Reader

    from .columns import Part

    Int64s = NDArray[np.int64]
    Rows = NDArray[np.integer]

_WAYS: Final = (("key",), ("shard", "key"), ("sample_index",))
_MOST_TEXT: Final = (1 << 31) - 1
"""Bytes of text that one Arrow array holds with 32-bit offsets."""
_MAGIC: Final = 8
_OF_VIEWS: Final = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


class Joined:
    """The columns of a table, a value for each sample that has a row in it. Made by `join_table`.

    Rows are looked up, and columns read, when they are needed first. Another process gets the table itself, or where
    its files are.

    Attributes:
        on: The columns that it is joined by.
        types: Those of the other columns, by name.
    """

    def __init__(self, source: _Source, on: tuple[str, ...]) -> None:
        self.on = on
        self.types: dict[str, pa.DataType] = {
            name: kind for name, kind in zip(source.schema.names, source.schema.types, strict=True) if name not in on
        }
        self._source = source
        self._columns: dict[str, pa.ChunkedArray] = {}
        self._rows: Rows | None = None

    def rows(self, catalog: Catalog) -> Rows:
        """Return for each sample of the dataset the number of its row in the table; -1 where it has none.

        Raises:
            ValueError: Two rows are for the same sample, or a column to join by has values of another kind.
            ChangedError: A file of the table was changed since it was opened.
            StorageError: It cannot be read.
        """
        if self._rows is None:
            match = {"key": _by_key, "shard": _by_shard, "sample_index": _by_number}[self.on[0]]
            self._rows = match(self._source.read(self.on), catalog)
        return self._rows

    def unmatched(self, catalog: Catalog) -> Int64s:
        """Return the rows of the table that are no sample's."""
        rows = self.rows(catalog)
        has_sample = np.zeros(self._source.read(self.on).num_rows, np.bool_)
        has_sample[rows[rows >= 0]] = True
        return np.flatnonzero(~has_sample)

    def row_name(self, row: int) -> str:
        """Return what stands in the columns that the table is joined by, as text."""
        table = self._source.read(self.on)
        return ", ".join(repr(table.column(name)[row].as_py()) for name in self.on)

    def column(self, catalog: Catalog, part: Part, name: str) -> pa.ChunkedArray:
        """Return a column, a value for each sample of a part; null where the sample has no row."""
        if name not in self._columns:
            self._columns[name] = self._source.read((name,)).column(name)
        start = part.first_sample
        rows = part.of(self.rows(catalog)[start : start + part.group.files.num_samples])
        values = self._columns[name]
        try:
            return values.take(pa.array(rows, mask=rows < 0))
        except pa.ArrowNotImplementedError as error:
            what = f"rows of the joined column {name!r}, which is of {values.type}, cannot be looked up ({error})"
            raise ValueError(f"{what} - cast it, or leave it out, before the table is joined") from error

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_columns": {}, "_rows": None}


class _Source(Protocol):
    """A table, in memory or in files."""

    @property
    def schema(self) -> pa.Schema:
        """Its columns."""

    def read(self, names: tuple[str, ...]) -> pa.Table:
        """Return some of its columns."""


class _InMemory(NamedTuple):
    table: pa.Table

    @property
    def schema(self) -> pa.Schema:
        return self.table.schema

    def read(self, names: tuple[str, ...]) -> pa.Table:
        return self.table.select(list(names))


class _InFiles:
    """A table that lies in files, one after the other, each in the version that it had when it was joined."""

    def __init__(self, urls: Sequence[str]) -> None:
        store = AnyStore()
        readers = [store.open(url) for url in urls]
        schemas = [_read_file(reader, None).schema for reader in readers]
        try:
            self.schema: pa.Schema = pa.unify_schemas(schemas, promote_options="permissive")
        except pa.ArrowException as error:
            raise _apart(urls, error) from error
        self._files = [(reader.url, reader.size, reader.identity) for reader in readers]
        self._last: tuple[tuple[str, ...], pa.Table | None] = ((), None)

    def read(self, names: tuple[str, ...]) -> pa.Table:
        """Return some columns; those that were asked for last stay in memory."""
        last, table = self._last
        if last != names or table is None:
            store = AnyStore()
            pieces = []
            for url, size, identity in self._files:
                reader = store.open(url)
                if (reader.size, reader.identity) != (size, identity):
                    what = "the file was changed since its columns were joined"
                    raise ChangedError(what, url=url, hint="select again")
                pieces.append(_read_file(reader, names))
            try:
                table = pa.concat_tables(pieces, promote_options="permissive").select(list(names)).combine_chunks()
            except pa.ArrowInvalid as error:  # values that do not fit what the files' types have in common
                raise _apart([url for url, _, _ in self._files], error, names) from error
            self._last = names, table
        return table

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": ((), None)}


def _apart(urls: Sequence[str], error: pa.ArrowException, names: tuple[str, ...] = ()) -> ValueError:
    """Return the error to raise where the columns of several files do not make one table."""
    which = f"the columns {' and '.join(map(repr, names))} of" if names else "the columns of"
    first, last = without_secrets(urls[0]), without_secrets(urls[-1])
    what = f"{which} {len(urls)} files, {first} to {last}, do not go together ({error})"
    return ValueError(f"{what} - write each column with one type in all files")


def join_table(columns: Any, on: str | Sequence[str]) -> Joined:
    """Make a table ready to be joined to a dataset.

    Args:
        columns: A table, or whatever ``pyarrow.table`` makes one of; or the path or url of a Parquet or Arrow (Feather)
            file; or a list of these, whose rows follow each other.
        on: What both have in common: ``"key"``, ``["shard", "key"]``, or ``"sample_index"``.

    Raises:
        ValueError: The table lacks a column to join by, or has two of one name, or names that are no text; or a file is
            neither Parquet nor Arrow, or several do not go together.
        TypeError: `columns` is nothing of that.
        StorageError: A file cannot be read.
    """
    names = (on,) if isinstance(on, str) else tuple(on)
    if set(names) == {"shard", "key"}:
        names = ("shard", "key")
    if names not in _WAYS:
        raise ValueError(f"on must be 'key', ['shard', 'key'] or 'sample_index', not {on!r}")
    source: _Source
    if isinstance(columns, str | os.PathLike):
        source = _InFiles([_whole(columns)])
    elif isinstance(columns, Sequence) and all(isinstance(item, str | os.PathLike) for item in columns):
        if not columns:
            raise ValueError("columns is an empty list: no file to join")
        source = _InFiles([_whole(item) for item in columns])
    else:
        try:
            table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        except (TypeError, ValueError, pa.ArrowException) as error:
            what = f"columns are a table, a Parquet or Arrow file, or a list of files, not {type(columns).__name__}"
            raise TypeError(f"{what} ({error})") from error
        source = _InMemory(_plain_table(table).combine_chunks())
    there = source.schema.names
    missing = [name for name in names if name not in there]
    if missing:
        raise ValueError(f"the table has no column {missing[0]!r} to join by - it has {listed(there)}")
    twice = sorted({name for name in there if there.count(name) > 1})
    if twice:
        raise ValueError(f"the table has two columns {twice[0]!r} - rename one of them")
    if isinstance(source, _InMemory):  # files are looked at as they are read
        try:
            source.read(names).validate(full=True)
        except pa.ArrowInvalid as error:
            what = f"the table's column {' or '.join(map(repr, names))} holds what is not of its type ({error})"
            raise ValueError(f"{what} - make the table anew") from error
    return Joined(source, names)


def _whole(path: str | os.PathLike[str]) -> str:
    """Return a path from the root on, so that it leads to the same file from another working folder."""
    url = os.fspath(path)
    return url if url_scheme(url) not in {"", "file"} else str(Path(local_path(url)).absolute())


def _read_file(reader: Reader, names: tuple[str, ...] | None) -> pa.Table:
    """Read some columns of a Parquet file, or of an Arrow file or stream; None for the columns without rows."""
    file = open_payload(reader, 0, reader.size)
    magic = file.read(_MAGIC)
    file.seek(0)
    try:
        if magic.startswith(b"PAR1"):
            from pyarrow import parquet  # noqa: PLC0415 - takes a while to load

            content = parquet.ParquetFile(file, pre_buffer=False)
            if names is None:
                return _without_rows(content.schema_arrow)
            # Threads of Arrow that read a file of Python's may still hold it when the interpreter ends, and abort it.
            table = content.read(columns=list(names), use_threads=False)
        else:
            open_file = pa.ipc.open_file if magic.startswith(b"ARROW1") else pa.ipc.open_stream
            schema = open_file(file).schema
            if names is None:
                return _without_rows(schema)
            wanted = [schema.get_field_index(name) for name in names if name in schema.names]
            file.seek(0)
            table = open_file(file, options=pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)).read_all()
        table = _plain_table(table)
        table.validate(full=True)
    except (pa.ArrowException, EOFError, UnicodeDecodeError) as error:
        if isinstance(error.__context__, OSError):  # of the file, which pyarrow turns into one of its own
            raise error.__context__ from error
        raise _unreadable(without_secrets(reader.url), error) from error
    return table


def _unreadable(url: str, error: Exception) -> ValueError:
    if isinstance(error, pa.ArrowNotImplementedError):
        what = f"{url} has columns that cannot be joined ({error})"
        return ValueError(f"{what} - write the file with other types, or without them")
    return ValueError(f"{url} is no Parquet or Arrow file ({error})")


def _without_rows(schema: pa.Schema) -> pa.Table:
    return pa.schema([field.with_type(_plain(field.type)) for field in schema]).empty_table()


def _plain_table(table: pa.Table) -> pa.Table:
    """Return a table in forms that Arrow computes with: without views, which Polars makes of text, and runs."""
    for at, field in enumerate(table.schema):
        kind = _plain(field.type)
        if kind != field.type:
            try:
                column = table.column(at).cast(kind)
            except (pa.ArrowNotImplementedError, pa.ArrowInvalid):  # most of what is nested, and much before pyarrow 18
                column = pa.chunked_array([pa.array(table.column(at).to_pylist(), kind)])
            table = table.set_column(at, field.name, column)
    return table


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type of the same values without views and runs, in lists and structs too."""
    is_a = pa.types
    if kind in _OF_VIEWS:
        return _OF_VIEWS[kind]
    if is_a.is_run_end_encoded(kind) or is_a.is_dictionary(kind):
        values = _plain(kind.value_type)
        return kind if is_a.is_dictionary(kind) and values == kind.value_type else values
    if is_a.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if is_a.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_plain(kind.value_type)))
    if is_a.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)), kind.list_size)
    if is_a.is_map(kind):
        return pa.map_(_plain(kind.key_type), kind.item_field.with_type(_plain(kind.item_type)))
    if is_a.is_struct(kind):
        parts = [kind.field(at) for at in range(kind.num_fields)]
        return pa.struct([part.with_type(_plain(part.type)) for part in parts])
    return kind


# ---- rows by key and by number


def _by_key(table: pa.Table, catalog: Catalog) -> Rows:
    codes, distinct = _encoded(table, "key")
    rows = np.full(len(distinct), -1, np.int64)
    there = np.flatnonzero(codes >= 0)
    rows[codes[there]] = there
    _refuse_twice(table, there, rows[codes[there]])
    return _row_of(rows, _key_codes(catalog, distinct))


def _by_shard(table: pa.Table, catalog: Catalog) -> Rows:
    (shards, names), (codes, distinct) = _encoded(table, "shard"), _encoded(table, "key")
    there = np.flatnonzero((shards >= 0) & (codes >= 0))
    pairs = shards[there] * np.int64(len(distinct)) + codes[there]
    first = pc.index_in(pa.array(pairs), value_set=pa.array(pairs)).to_numpy(zero_copy_only=False)
    _refuse_twice(table, there, there[first])
    of_samples = _key_codes(catalog, distinct)
    for number, start in enumerate(catalog.sample_starts[:-1]):
        group, part = catalog.group(number), slice(start, catalog.sample_starts[number + 1])
        of_shards = _found(_as_binary(group.shards.column("name")), names)[group.shard]
        has_both = (of_samples[part] >= 0) & (of_shards >= 0)
        of_samples[part] = np.where(has_both, of_shards * np.int64(len(distinct)) + of_samples[part], -1)
    return _row_of(there, _found(pa.array(of_samples), pa.array(pairs)))


def _by_number(table: pa.Table, catalog: Catalog) -> Rows:
    column = table.column("sample_index")
    if not pa.types.is_integer(column.type):
        what = f"the table's column 'sample_index' is of {column.type}, and samples are numbered by integers"
        raise ValueError(f"{what} - cast it")
    # Numbers from 2**63 on become negative, and are no sample's either way.
    numbers = pc.fill_null(column.cast(pa.int64(), safe=False), -1).to_numpy()
    there = np.flatnonzero((numbers >= 0) & (numbers < catalog.num_samples))
    rows = np.full(catalog.num_samples, -1, np.int64)
    rows[numbers[there]] = there
    _refuse_twice(table, there, rows[numbers[there]])
    return rows


def _encoded(table: pa.Table, name: str) -> tuple[Int64s, pa.Array]:
    """Number the distinct texts of a column: a number for each row (-1 for null), and the texts as bytes."""
    column = table.column(name)
    kind = column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if kind not in {pa.string(), pa.large_string()}:
        raise ValueError(
            f"the table's column {name!r} is of {kind}, and the dataset's is text - cast it, or join by 'sample_index'"
        )
    large = column.nbytes > _MOST_TEXT
    texts = column.cast(pa.large_string() if large else pa.string()).cast(pa.large_binary() if large else pa.binary())
    if not len(texts):
        return np.zeros(0, np.int64), pa.array([], texts.type)
    encoded = texts.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):  # more than one array can hold
        encoded = encoded.combine_chunks()
    codes: Int64s = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes, encoded.dictionary


def _key_codes(catalog: Catalog, distinct: pa.Array) -> Int64s:
    """Return for each sample the number of its key among some; -1 if it is none of them."""
    keys = [_as_binary(catalog.group(number).column("key")) for number in range(catalog.num_groups)]
    return _found(pa.chunked_array(keys, pa.binary()), distinct)


def _found(values: pa.Array | pa.ChunkedArray, among: pa.Array) -> Int64s:
    """Return where each value stands among others, whose places are looked up at once; -1 where it does not."""
    places = pc.index_in(values.cast(among.type), value_set=among)
    return pc.fill_null(places, -1).to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]


def _as_binary(column: pa.Array) -> pa.Array:
    return column.cast(pa.binary())


def _row_of(rows: Rows, places: Int64s) -> Rows:
    """Return ``rows[place]`` for each place; -1 for -1."""
    found: Rows = np.append(rows, -1)[places]
    return found.astype(np.int32) if not len(rows) or rows.max() <= np.iinfo(np.int32).max else found


def _refuse_twice(table: pa.Table, rows: Int64s, others: Int64s) -> None:
    """Refuse two rows for one sample; `others` are the rows that were found for the samples of `rows`."""
    twice = np.flatnonzero(rows != others)
    if len(twice):
        pair = sorted((int(rows[twice[0]]), int(others[twice[0]])))
        name = ", ".join(f"{name} {table.column(name)[pair[0]].as_py()!r}" for name in table.column_names)
        raise ValueError(f"rows {pair[0]} and {pair[1]} of the table are both for {name} - keep one of them")
