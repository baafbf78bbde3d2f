"""Conversion of loose files, or of archives without indexes, into indexed shards, a shard at a time.

What is written, and the file that says how far it has come, are webshart's: a conversion begun by one can be gone on
with by the other. Each run writes the same bytes, however often it was stopped.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from shardset.errors import NotFoundError
from shardset.index.build import build_index
from shardset.index.sidecar import dump_sidecar
from shardset.policy import Place, Policy, Report
from shardset.storage.local import LocalReader

from .member_writer import MemberWriter
from .optimize_input import find_input
from .optimize_state import SCHEMA_VERSION, STATE_NAME, OptimizeState
from .optimize_target import Folder, HubRepository, require_hub
from .tar_headers import END_SIZE, member_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardset.formats.captions import Captions

    from .optimize_input import Archives, Item, LooseFiles
    from .optimize_target import HubClasses

DEFAULT_PAYLOAD_EXTENSIONS: Final = (
    *(".avif", ".bmp", ".flac", ".gif", ".jpeg", ".jpg", ".jxl", ".m4a", ".mkv", ".mov"),
    *(".mp3", ".mp4", ".ogg", ".png", ".tif", ".tiff", ".wav", ".webm", ".webp"),
)
"""Suffixes of the files that are packed if nothing else is said: images, audio, video."""


def optimize_dataset(
    source: str | os.PathLike[str],
    *,
    destination: str | os.PathLike[str] | None = None,
    push_to_hub: str | None = None,
    source_subfolder: str = "",
    output_prefix: str = "webshart",
    source_revision: str = "main",
    target_revision: str = "main",
    hf_token: str | None = None,
    max_shard_size_bytes: int = 1024**3,
    payload_extensions: Sequence[str] = DEFAULT_PAYLOAD_EXTENSIONS,
    include_image_geometry: bool = True,
    max_shards: int | None = None,
    private: bool | None = None,
    policy: Policy | None = None,
    progress: Callable[[int, int], None] | None = None,
    require: Callable[[], HubClasses] = require_hub,
) -> dict[str, Any]:
    """Convert loose files with sidecars, or archives of files named by their captions, into indexed shards.

    Loose files are packed in the order of their paths. The captions in the ``.txt`` or ``.json`` file beside each go
    into the index, and so does the whole of a ``.json`` file; the sidecars themselves are not packed. Where there are
    no loose files to pack but tars, their members are packed, and their names without suffix become captions.

    A run that was killed at any moment is simply run again, with the same arguments, and goes on behind the last whole
    shard. Each shard is written, flushed and named before the state says so.

    Args:
        source: A folder on this machine.
        destination: Folder on this machine to write to.
        push_to_hub: Dataset repository of the Hub, ``"owner/name"``, to upload each shard to; without a destination one
            shard at a time is on the disk. Its state counts, if there is a destination too.
        source_subfolder: Pack only what is below this folder of `source`.
        output_prefix: Folder below the destination, or in the repository, for shards, indexes and state.
        source_revision: Of a source on the Hub.
        target_revision: Branch of the repository that is pushed to.
        hf_token: Token for the Hub; by default that in the environment's ``HF_TOKEN``.
        max_shard_size_bytes: A shard is closed before it would pass this many bytes, extension headers for long names
            apart; one larger file has a shard of its own.
        payload_extensions: Suffixes of the files to pack, in any case, with or without dot.
        include_image_geometry: Put the pixel sizes of images into the indexes.
        max_shards: How many shards to write in this run.
        private: Whether a repository that is made is private.
        policy: What to do about damaged archives and sidecars that cannot be read; by default they raise. An archive
            whose end is missing is packed up to there, with a warning, unless `Policy.codes` say otherwise.
        progress: Called with (samples packed, samples in all or 0 if nobody knows).
        require: Gives the classes of ``huggingface_hub``.

    Returns:
        The state, field by field; ``shards_created``, in this run; ``resumed``; and ``findings``, what was met in this
        run and is not as it should be: cut and doubled members, with ``code``, ``count`` and the first ``places``.

    Raises:
        ValueError: There is no place to write to, a number is not positive, a prefix leaves its folder, or nothing is
            there to be packed.
        StateError: Shards of another source or of other settings are there.
        FormatError: An archive is damaged, or a name in it leads out of its folder.
        DecodeError: A sidecar cannot be read.
        ChangedError: A file is not what it was when the run began.
        StorageError: Reading or writing failed.
        MissingExtraError: ``huggingface_hub`` is needed and not installed.
    """
    if destination is None and push_to_hub is None:
        raise ValueError("destination or push_to_hub is required")
    if max_shard_size_bytes <= 0:
        raise ValueError(f"max_shard_size_bytes={max_shard_size_bytes}: must be greater than zero")
    if max_shards is not None and max_shards <= 0:
        raise ValueError(f"max_shards={max_shards}: must be greater than zero")
    extensions = _normal_extensions(payload_extensions)
    subfolder, prefix = _normal_prefix(source_subfolder), _normal_prefix(output_prefix)
    folder = None if destination is None else Folder(Path(destination).expanduser() / prefix)
    policy, report = policy or Policy(), Report()
    packed = find_input(
        _local_root(source, source_revision) / subfolder,
        extensions=extensions,
        output=None if folder is None else folder.path,
        policy=policy,
        report=report,
    )
    fresh = OptimizeState(
        schema_version=SCHEMA_VERSION,
        status="running",
        source={"kind": "local", "subfolder": subfolder},
        manifest_sha256=packed.manifest_sha256,
        output_prefix=prefix,
        max_shard_size_bytes=max_shard_size_bytes,
        payload_extensions=extensions,
        total_samples=packed.total_samples,
        input_layout=packed.layout,
    )
    hub = None
    if push_to_hub is not None:
        token = hf_token or os.environ.get("HF_TOKEN")
        hub = HubRepository(
            push_to_hub, prefix=prefix, revision=target_revision, token=token, private=private, require=require
        )
    with ExitStack() as stack:
        if folder is None:
            folder = Folder(Path(stack.enter_context(TemporaryDirectory(prefix="shardset-optimize-"))))
        else:
            stack.enter_context(folder.locked())
        known = folder.load_state() if hub is None else hub.load_state()
        if known is not None:
            known.check_resumes(fresh)
            if known.status == "complete":
                return _result(known, 0, resumed=True, report=report)
        elif hub is None:
            folder.write_state(fresh)  # or a run that is killed would leave the first shard without a state
            folder.publish(STATE_NAME)
        run = _Run(packed, known or fresh, folder, hub, report)
        run.geometry, run.progress, run.keeps_shards = include_image_geometry, progress, destination is not None
        resumed = run.state.next_sample_index > 0
        created = run.write_shards(max_shards)
    return _result(run.state, created, resumed=resumed, report=report)


def _result(state: OptimizeState, created: int, *, resumed: bool, report: Report) -> dict[str, Any]:
    findings = [{"code": code, "count": count, "places": [*map(str, places)]} for code, count, places in report]
    return {**asdict(state), "shards_created": created, "resumed": resumed, "findings": findings}


@dataclass(slots=True)
class _Run:
    """One run of a conversion. `state` is always that of the last shard which is whole and in its place."""

    packed: LooseFiles | Archives
    state: OptimizeState
    folder: Folder
    hub: HubRepository | None
    report: Report
    geometry: bool = True
    progress: Callable[[int, int], None] | None = None
    keeps_shards: bool = True

    def write_shards(self, most: int | None) -> int:
        """Write shards until all is packed, or `most` are written; return how many were."""
        items = _Items(self.packed.iter_items(self.state))
        if items.following is None and not self.state.next_sample_index:
            raise ValueError(f"no member of the archives matched: {', '.join(self.state.payload_extensions)}")
        created = 0
        while items.following is not None and (most is None or created < most):
            self._write_shard(items)
            created += 1
        if items.following is None and self.state.status != "complete":
            self._save(self._position(items, self.state))
        return created

    def _write_shard(self, items: _Items) -> None:
        number = self.state.next_shard_index
        tar_name, index_name = f"shard-{number:05d}.tar", f"shard-{number:05d}.json"
        state = replace(self.state, next_shard_index=number + 1)
        said: dict[bytes, tuple[Captions, dict[str, Any] | None]] = {}
        with self.folder.writing(tar_name) as (path, file):
            self._pack(items, MemberWriter(file), state, said, tar_name)
        try:
            with self.folder.writing(index_name) as (_, file):
                file.write(self._index(path, tar_name, said))
        except BaseException:
            self.folder.discard(tar_name)
            raise
        places = self.folder.publish(tar_name, index_name)
        self._save(self._position(items, state), *places)
        if not self.keeps_shards:
            self.folder.remove(tar_name, index_name, STATE_NAME)

    def _pack(
        self,
        items: _Items,
        writer: MemberWriter,
        state: OptimizeState,
        said: dict[bytes, tuple[Captions, dict[str, Any] | None]],
        tar_name: str,
    ) -> None:
        """Write items into a tar as long as they fit, and count them in `state`."""
        size = END_SIZE
        while (item := items.following) is not None:
            size += member_size(item.size)
            if said and size > state.max_shard_size_bytes:
                break
            captions, document = item.describe()
            writer.add(item.name, item.size, item.read())
            raw = item.name.encode("utf-8", "surrogateescape")
            if raw in said:
                message = "packed twice; the index lists both"
                self.report.add("duplicate_member", Place(tar_name, key=item.name, message=message))
            said[raw] = captions, document
            state.next_sample_index += 1
            state.bytes_sharded += item.size
            if captions is None:
                state.uncaptioned_samples += 1
            else:
                state.captioned_samples += 1
            items.advance()
            if self.progress is not None:
                self.progress(state.next_sample_index, state.total_samples)
        writer.close()

    def _index(self, path: Path, tar_name: str, said: dict[bytes, tuple[Captions, dict[str, Any] | None]]) -> bytes:
        """Return the index file of a shard that is still under its hidden name."""
        report = Report()
        reader = LocalReader(str(path), mmap=os.name != "nt")  # Windows renames no file that is mapped
        has_sidecars = not {".json", ".txt"}.isdisjoint(self.state.payload_extensions)
        index = build_index(reader, captions=has_sidecars, geometry=self.geometry, report=report)
        for code, count, places in report:
            self.report.add(code, count=count - len(places))
            for place in places:
                self.report.add(code, replace(place, shard=tar_name))
        captions, extra = dict(index.captions), dict(index.extra)
        for row, name in enumerate(index.names):
            value, document = said[name]
            if value is not None:
                captions[row] = value
            if document is not None:
                extra[row] = {**extra.get(row, {}), "json_metadata": document}
        return dump_sidecar(replace(index, captions=captions, extra=extra), name=tar_name)

    def _position(self, items: _Items, state: OptimizeState) -> OptimizeState:
        """Return a state with what follows from the next item: the place to go on at, or that all is done."""
        following = items.following
        archive, offset = (self.packed.num_archives, 0) if following is None else (following.archive, following.offset)
        return replace(
            state,
            status="complete" if following is None else "running",
            next_source_archive_index=archive,
            next_source_member_offset=offset,
        )

    def _save(self, state: OptimizeState, *shard: Path) -> None:
        """Keep a state, with the shard that it speaks of for the first time."""
        if self.hub is not None:
            path = self.folder.write_state(state)
            self.hub.commit(state.next_shard_index - 1, {**{file.name: file for file in shard}, STATE_NAME: path})
        else:
            self.folder.write_state(state)
        self.folder.publish(STATE_NAME)
        self.state = state


class _Items:
    """Items with a look at the next one. None follows the last."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        self.following = next(items, None)

    def advance(self) -> None:
        """Go on by one."""
        self.following = next(self._items, None)


def _local_root(source: str | os.PathLike[str], revision: str) -> Path:
    root = Path(source).expanduser()
    if not root.is_dir():
        what = "no such folder, and a dataset of the Hub cannot be converted from afar"
        hint = f"download it (hf download --repo-type dataset --revision {revision}) and name its folder"
        raise NotFoundError(what, url=os.fspath(source), hint=hint)
    return root


def _normal_prefix(value: str) -> str:
    parts = PurePosixPath(value.strip("/")).parts
    if ".." in parts:
        raise ValueError(f"invalid repository path prefix: {value!r}")
    return "/".join(parts)


def _normal_extensions(extensions: Sequence[str]) -> list[str]:
    stripped = {extension.strip().lower() for extension in extensions} - {""}
    if not stripped:
        raise ValueError("at least one payload extension is required")
    return sorted({extension if extension.startswith(".") else f".{extension}" for extension in stripped})
