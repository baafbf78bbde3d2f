"""What a conversion packs: loose files with their sidecars, or the members of archives, one after the other."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardset.errors import ChangedError, DecodeError, FormatError, NotFoundError
from shardset.formats.tar import Kind
from shardset.index.build import scan_reader
from shardset.policy import Place, Policy, settle
from shardset.storage.local import LocalReader, storage_error

from .optimize_captions import MAX_SIDECAR, caption_from_name, parse_json_sidecar, parse_text_sidecar
from .optimize_state import STATE_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from shardset.formats.captions import Captions
    from shardset.formats.tar import TarTable
    from shardset.policy import Report

    from .optimize_state import OptimizeState

_PIECE: Final = 1 << 20
_OWN_OUTPUT: Final = re.compile(rf"shard-\d{{5,}}\.(?:tar|json)|{re.escape(STATE_NAME)}|\..*\.partial")
_WARN: Final = Policy(on_error="warn")
_ENDS_EARLY: Final = frozenset({"truncated_header", "truncated_payload", "dangling_extension"})


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the source: its path below it, with slashes, its size in bytes, and where it is."""

    path: str
    size: int
    place: Path


@dataclass(frozen=True, slots=True)
class Item:
    """One file to pack.

    Attributes:
        name: Its name in the shard.
        size: Bytes of its payload.
        archive: Number of the archive that it comes from; 0 for a loose file.
        offset: The byte in the archive where its first header is; 0 for a loose file.
        read: Gives its payload, in pieces.
        describe: Gives its captions, and its JSON metadata.
    """

    name: str
    size: int
    archive: int
    offset: int
    read: Callable[[], Iterable[Buffer]]
    describe: Callable[[], tuple[Captions, dict[str, Any] | None]]


def find_input(
    root: Path, *, extensions: Sequence[str], output: Path | None, policy: Policy, report: Report
) -> LooseFiles | Archives:
    """Look through a folder, at any depth; links to folders are not followed.

    Args:
        root: The folder.
        extensions: Suffixes of the files to pack, in lower case and with their dots.
        output: The folder that shards are written to. What a conversion puts there is no input, if that lies in `root`.
        policy: What to do about sidecars and archives that are damaged.
        report: Counts them.

    Returns:
        The loose files if there are any to pack, else the archives.

    Raises:
        ValueError: There is nothing to pack.
        NotFoundError: There is no such folder.
        StorageError: A folder cannot be listed.
    """
    files = _list_files(root, output)
    loose = sorted((file for file in files if _suffix(file.path) in extensions), key=lambda file: file.path)
    if loose:
        return LooseFiles(loose, files, policy, report)
    archives = sorted((file for file in files if _suffix(file.path) == ".tar"), key=lambda file: file.path)
    if archives:
        return Archives(archives, extensions, policy, report)
    raise ValueError(f"no loose payload files or legacy tar archives matched: {', '.join(extensions)}, in {root}")


def _list_files(root: Path, output: Path | None) -> list[SourceFile]:
    def fail(error: OSError) -> None:
        raise storage_error(error, str(error.filename or root)) from error

    if not root.is_dir():
        raise NotFoundError("local source folder does not exist", url=str(root))
    is_ours = None if output is None else output.resolve()
    files = []
    for folder, _, names in os.walk(root, onerror=fail):
        is_output = is_ours is not None and Path(folder).resolve() == is_ours
        for name in names:
            if is_output and _OWN_OUTPUT.fullmatch(name):
                continue
            place = Path(folder, name)
            try:
                status = place.stat()
            except FileNotFoundError:
                continue  # a link that leads nowhere
            except OSError as error:
                raise storage_error(error, str(place)) from error
            if stat.S_ISREG(status.st_mode):
                files.append(SourceFile(place.relative_to(root).as_posix(), status.st_size, place))
    return files


def _suffix(path: str) -> str:
    return PurePosixPath(path).suffix.lower()


def _stem(path: str) -> str:
    return str(PurePosixPath(path).with_suffix(""))


class LooseFiles:
    """Files that each become a sample, with the ``.txt`` or ``.json`` file beside it as its sidecar."""

    layout = "loose"
    num_archives = 0

    def __init__(self, files: list[SourceFile], beside: Iterable[SourceFile], policy: Policy, report: Report) -> None:
        sidecars: dict[str, SourceFile] = {}
        for file in beside:
            suffix = _suffix(file.path)
            if suffix == ".txt" or (suffix == ".json" and _stem(file.path) not in sidecars):
                sidecars[_stem(file.path)] = file
        self._pairs = [(file, sidecars.get(_stem(file.path))) for file in files]
        self._policy = policy
        self._report = report
        self.total_samples = len(files)

    @property
    def manifest_sha256(self) -> str:
        """The digest of path and size of every file and its sidecar, in order."""
        digest = hashlib.sha256()
        for file, sidecar in self._pairs:
            digest.update(_listed(file) + b"\0" + (b"" if sidecar is None else _listed(sidecar)) + b"\n")
        return digest.hexdigest()

    def iter_items(self, state: OptimizeState) -> Iterator[Item]:
        """Yield the files that come behind those that are packed."""
        for file, sidecar in self._pairs[state.next_sample_index :]:
            yield Item(file.path, file.size, 0, 0, partial(_iter_file, file), partial(self._describe, sidecar))

    def _describe(self, sidecar: SourceFile | None) -> tuple[Captions, dict[str, Any] | None]:
        if sidecar is None:
            return None, None
        is_text = _suffix(sidecar.path) == ".txt"
        code, problem, cause = "bad_text_sidecar" if is_text else "bad_json_sidecar", None, None
        if sidecar.size > MAX_SIDECAR:
            code, problem = "sidecar_too_big", f"caption sidecar exceeds {MAX_SIDECAR} bytes: it has {sidecar.size}"
        else:
            payload = b"".join(_iter_file(sidecar))
            try:
                return (parse_text_sidecar(payload), None) if is_text else parse_json_sidecar(payload)
            except ValueError as error:
                problem, cause = f"caption sidecar cannot be read: {error}", error
        error_raised = DecodeError(
            f"{problem}, in {sidecar.path}", key=_stem(sidecar.path), hint="mend it or take it away"
        )
        error_raised.__cause__ = cause
        settle(error_raised, code, Place(str(sidecar.place), message=problem), self._policy, self._report)
        return None, None


class Archives:
    """Tars of files whose names are their captions: an older layout, without sidecars."""

    layout = "legacy_tar"
    total_samples = 0

    def __init__(self, archives: list[SourceFile], extensions: Sequence[str], policy: Policy, report: Report) -> None:
        self._archives = archives
        self._extensions = frozenset(extensions)
        self._policy = policy
        self._report = report
        self.num_archives = len(archives)

    @property
    def manifest_sha256(self) -> str:
        """The digest of path and size of every archive, in order."""
        return hashlib.sha256(b"".join(_listed(archive) + b"\n" for archive in self._archives)).hexdigest()

    def iter_items(self, state: OptimizeState) -> Iterator[Item]:
        """Yield the members that come behind those that are packed, in the order of the archives."""
        first = state.next_source_archive_index
        for number, archive in enumerate(self._archives[first:], first):
            start = state.next_source_member_offset if number == first else 0
            yield from self._iter_archive(number, archive, start)

    def _iter_archive(self, number: int, archive: SourceFile, start: int) -> Iterator[Item]:
        reader = LocalReader(str(archive.place))
        if reader.size != archive.size:
            raise _changed(archive, reader.size)
        table = scan_reader(reader)
        self._settle_faults(table, archive)
        # By the member's own header, since webshart's offsets leave out global extension headers.
        for row in range(int(np.searchsorted(table.header_offset, start)), len(table)):
            if table.kind[row] != Kind.FILE:
                continue
            raw = table.names[row].decode("utf-8", "surrogateescape")
            if _suffix(raw) not in self._extensions:
                continue
            offset = int(table.first_offset[row])
            path = PurePosixPath(raw)
            if path.is_absolute() or ".." in path.parts:
                what = f"unsafe path in source tar: {raw!r}"
                error = FormatError(what, shard=str(archive.place), offset=offset, code="unsafe_name", member=raw)
                settle(error, "unsafe_name", Place(str(archive.place), offset, raw), self._policy, self._report)
                continue
            name = str(PurePosixPath(_stem(archive.path), path))
            caption = caption_from_name(raw)
            size = int(table.size[row])
            read = partial(_iter_member, reader, table, row)
            yield Item(name, size, number, offset, read, partial(_named, caption))

    def _settle_faults(self, table: TarTable, archive: SourceFile) -> None:
        for fault in table.faults:
            place = Place(str(archive.place), fault.offset, fault.member, fault.message)
            if fault.code in _ENDS_EARLY and fault.code not in self._policy.codes:
                # An archive whose last member is cut was always packed without that.
                lenient = self._policy if self._policy.on_error != "raise" else _WARN
                settle(fault.error(str(archive.place)), fault.code, place, lenient, self._report)
            elif fault.is_error or fault.code in self._policy.codes:
                settle(fault.error(str(archive.place)), fault.code, place, self._policy, self._report)
            else:
                self._report.add(fault.code, place)


def _listed(file: SourceFile) -> bytes:
    return file.path.encode("utf-8", "surrogateescape") + b"\0" + str(file.size).encode()


def _named(caption: str | None) -> tuple[Captions, dict[str, Any] | None]:
    return caption, None


def _iter_file(file: SourceFile) -> Iterator[bytes]:
    """Yield the bytes of a file, and make sure that they are as many as were listed."""
    try:
        with file.place.open("rb") as handle:
            left = file.size
            while piece := handle.read(min(_PIECE, left + 1)):
                left -= len(piece)
                if left < 0:
                    break
                yield piece
            if left:
                raise _changed(file, os.fstat(handle.fileno()).st_size)
    except OSError as error:
        raise storage_error(error, str(file.place)) from error


def _iter_member(reader: LocalReader, table: TarTable, row: int) -> Iterator[Buffer]:
    """Yield the payload of a member; holes of a sparse file become zeros."""
    pieces = table.sparse.get(row)
    if pieces is None:
        yield from _iter_range(reader, int(table.offset[row]), int(table.size[row]))
        return
    at = 0
    for piece in pieces:
        yield from _iter_zeros(piece.logical - at)
        yield from _iter_range(reader, piece.offset, piece.length)
        at = piece.logical + piece.length
    yield from _iter_zeros(int(table.size[row]) - at)


def _iter_range(reader: LocalReader, offset: int, length: int) -> Iterator[Buffer]:
    for start in range(offset, offset + length, _PIECE):
        yield reader.view(start, min(_PIECE, offset + length - start))


def _iter_zeros(length: int) -> Iterator[Buffer]:
    for start in range(0, length, _PIECE):
        yield bytes(min(_PIECE, length - start))


def _changed(file: SourceFile, size: int) -> ChangedError:
    what = f"the file was changed while it was packed: it had {file.size} bytes, now {size}"
    return ChangedError(what, url=str(file.place), hint="run it again when nobody writes there any more")
