"""Captions for indexes: those that people bring along, by names of samples, and those of the sidecars in a shard."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardset.errors import IndexFileError
from shardset.formats.captions import captions_from_json

from .build import build_index, fits_headers, iter_documents, read_texts
from .document import collector_paused, load_document
from .edit import PATH_NAMES, add_captions, dump_like, iter_entries, path_of
from .numbering import number_by_path
from .replacing import Replacements
from .sidecar import dump_sidecar, read_document
from .sidecar_entries import MalformedError
from .table import SIDECAR_SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from shardset.formats.captions import Captions
    from shardset.policy import Policy, Report
    from shardset.storage.store import Reader

    from .numbering import PathNumbering
    from .table import ShardIndex

_HINT: Final = "index the shard again"


def apply_captions_to_metadata(metadata: MutableMapping[str, Any], captions_by_sample: Mapping[str, Any]) -> int:
    """Write captions into the entries of an index, in place, over those that are there.

    A sample is named by its path or by its path without suffix. Where either the name or the entry has no folder, the
    rest decides; where both have one, the folders must be the same. An entry that is named exactly takes that; of
    several names that fit equally well, the last counts. Sidecars get no captions: no ``.json`` file, and no ``.txt``
    file beside a payload.

    Args:
        metadata: The JSON object of an index file.
        captions_by_sample: For each sample a string, an object, or a list of these. None and, in lists, empty strings
            are passed over; anything else counts as its text.

    Returns:
        How many entries were written.

    Raises:
        ValueError: `metadata` has no ``files``.
    """
    if not isinstance(metadata.get("files"), dict | list):
        raise ValueError("webshart metadata must contain a 'files' dict or list")  # noqa: TRY004 - webshart's
    names = _Names(captions_by_sample)
    listed = [(path_of(key, entry), entry) for key, entry in iter_entries(metadata) if _has_path(key, entry)]
    parted = [_split(path) for path, _ in listed]
    payloads = {stem for stem, suffix in parted if suffix not in SIDECAR_SUFFIXES}
    count = 0
    for (path, entry), (stem, suffix) in zip(listed, parted, strict=True):
        if suffix == ".json" or (suffix == ".txt" and stem in payloads):
            continue
        captions = names.look_up(path)
        if captions is not None:
            entry.pop("caption", None)
            entry["captions"] = captions
            count += 1
    return count


def write_captions_to_metadata(
    metadata_path: str | os.PathLike[str],
    captions_by_sample: Mapping[str, Any],
    output_path: str | os.PathLike[str] | None = None,
) -> int:
    """Write captions into an index file, as `apply_captions_to_metadata` does.

    Args:
        metadata_path: The index file.
        captions_by_sample: Captions by sample.
        output_path: Where to write the result; by default the file is replaced, at once and whole. Missing folders are
            made.

    Returns:
        How many entries were written.

    Raises:
        IndexFileError: The file is no index.
        ValueError: A caption is an object that JSON cannot hold.
        ChangedError: Somebody else changed the file meanwhile.
        StorageError: Reading or writing failed; the file is as it was.
    """
    source = os.fspath(metadata_path)
    target = source if output_path is None else os.fspath(output_path)
    _check_json(captions_by_sample)
    with Replacements() as files:
        payload = files.read(source)
        with collector_paused():
            try:
                document = load_document(payload, exact=True)
                count = apply_captions_to_metadata(document, captions_by_sample)
            except ValueError as error:
                raise IndexFileError(str(error), path=source, hint=_HINT) from error
            if count or output_path is not None:
                files.write(target, dump_like(document, payload) if count else payload)
        files.commit()
    return count


def _canonical(value: Any) -> Captions:
    """Return captions as they are stored, or None for none: webshart's rule."""
    if value is None or isinstance(value, str | dict):
        return value
    if not isinstance(value, list | tuple):
        return str(value)
    items = [item if isinstance(item, dict) else str(item) for item in value if item is not None]
    return [item for item in items if item != ""] or None


def _check_json(captions_by_sample: Mapping[str, Any]) -> None:
    """Refuse objects that JSON cannot hold: orjson would write null in place of what is no number.

    Raises:
        ValueError: There is one.
    """
    for sample, value in captions_by_sample.items():
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, dict):
                try:
                    json.dumps(item, allow_nan=False)
                except (TypeError, ValueError, RecursionError) as error:
                    raise ValueError(f"the captions of {sample!r} are no JSON: {error}") from error


def _has_path(key: Any, entry: Mapping[str, Any]) -> bool:
    return isinstance(key, str | dict) or any(isinstance(entry.get(name), str) for name in PATH_NAMES)


class _Names:
    """Captions by all names that a sample may be meant by."""

    def __init__(self, captions_by_sample: Mapping[str, Any]) -> None:
        exact: dict[str, Captions] = {}
        for sample, value in captions_by_sample.items():
            captions = _canonical(value)
            if captions is not None:
                exact[str(sample)] = captions
        self._names = {_without_suffix(name): captions for name, captions in exact.items()} | exact
        self._bare = {name.rpartition("/")[2]: captions for name, captions in self._names.items() if "/" in name}

    def look_up(self, path: str) -> Captions:
        """Return the captions for the entry of a path, or None."""
        folder, _, bare = path.rpartition("/")
        stem = _without_suffix(path)
        tables = [(path, self._names), (bare, self._names), (stem, self._names)]
        if folder:
            tables.append((stem.rpartition("/")[2], self._names))
        else:
            tables += [(path, self._bare), (stem, self._bare)]
        return next((table[name] for name, table in tables if name in table), None)


def _split(path: str) -> tuple[str, str]:
    """Split a path at the last dot of its last component: webshart's pairing, mended for dots in folders."""
    folder, slash, name = path.rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    return (f"{folder}{slash}{stem}", f".{suffix.lower()}") if dot else (path, "")


def _without_suffix(path: str) -> str:
    stem, _ = _split(path)
    return path if not stem or stem.endswith("/") else stem


@dataclass(frozen=True, slots=True)
class Coalesced:
    """The index file of a shard, with the captions of its sidecars in it.

    Attributes:
        payload: The file's bytes; the same object as before where nothing was added.
        captioned: Samples, as webshart counts them, that have captions in the index now.
        added: How many of these had none before.
    """

    payload: bytes
    captioned: int
    added: int


def coalesce_index(
    payload: bytes | None, reader: Reader, *, name: str, path: str, report: Report, policy: Policy | None = None
) -> Coalesced:
    """Write what the ``.txt`` and ``.json`` members of a shard say into the entries that have no captions yet.

    By webshart's pairing, and in its order: the ``.txt`` member first, the ``.json`` member if that says nothing.

    Args:
        payload: The shard's index file; None if it has none, and its headers are read.
        reader: The shard.
        name: The shard's file name.
        path: The index file's path or url, for messages.
        report: Counts members that cannot be read as captions, and oddities of a shard without an index.
        policy: What to do about the damage of a shard without an index.

    Raises:
        IndexFileError: The index file is malformed, or is not of this shard.
        FormatError: The shard has no index and is damaged, and the policy says to raise.
        StorageError: Reading failed.
    """
    with collector_paused():
        if payload is None:
            index = build_index(reader, policy=policy, report=report)
            captions, numbering = _sidecar_captions(index, reader, report)
            made = dump_sidecar(replace(index, captions=captions), name=name)
            return Coalesced(made, len(captions), len(captions))
        try:
            document = load_document(payload, exact=True)
            index = read_document(document, reader.size).index
        except MalformedError as error:
            raise IndexFileError(str(error), path=path, hint=_HINT) from error
        if index.num_files and not fits_headers(index, reader):
            what = "the index is stale: headers of the shard are not where it says"
            raise IndexFileError(what, path=path, hint=_HINT)
        captions, numbering = _sidecar_captions(index, reader, report)
        captioned = sum(index.captions.get(row) is not None for row in numbering.samples.tolist()) + len(captions)
        if not captions:
            return Coalesced(payload, captioned, 0)
        add_captions(document, {index.names.text(row): value for row, value in captions.items()})
        return Coalesced(dump_like(document, payload), captioned, len(captions))


def _sidecar_captions(index: ShardIndex, reader: Reader, report: Report) -> tuple[dict[int, Captions], PathNumbering]:
    """Return by row the captions that sidecars have for samples without any, and how the shard's files are numbered."""
    numbering = number_by_path(index)
    rows = numbering.samples
    lacks = np.ones(index.num_files, np.bool_)
    lacks[[row for row, value in index.captions.items() if value is not None]] = False
    wanted = np.flatnonzero(lacks[rows])
    texts = read_texts(index, reader, numbering.text_rows[wanted], report)
    found: dict[int, Captions] = {}
    left = []
    for row, text_row, json_row in zip(
        rows[wanted].tolist(), numbering.text_rows[wanted].tolist(), numbering.json_rows[wanted].tolist(), strict=True
    ):
        captions = texts.get(text_row)
        if captions is not None:
            found[row] = captions
        elif json_row >= 0:
            left.append((row, json_row))
    said = {
        json_row: captions_from_json(document)
        for json_row, document in iter_documents(index, reader, np.array([pair[1] for pair in left], np.int64), report)
    }
    found |= {row: captions for row, json_row in left if (captions := said.get(json_row)) is not None}
    return found, numbering
