"""Which catalog a dataset uses: the one beside its shards or in the user's cache, if it is fresh, or a new one.

A catalog is fresh while it names the same shards with the same size and identity (mtime and inode, or etag), and with
the same sidecar indexes, since people edit captions in them. What is stale is never trusted: shards that did not change
are taken over, the others are indexed again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardset.errors import IndexFileError, NotFoundError, ShardsetError, StorageError, without_secrets
from shardset.files import cache_root
from shardset.formats.faults import Fault
from shardset.formats.patterns import named_format
from shardset.index.build import build_index, fits_headers, settle_faults
from shardset.index.catalog import Catalog, open_catalog
from shardset.index.catalog_files import Manifest
from shardset.index.catalog_writer import row_from_catalog, shard_row, split_groups, write_group, write_manifest
from shardset.index.record_sidecar import parse_text_index
from shardset.index.records import extend_index
from shardset.index.sidecar import parse_sidecar, sidecar_path
from shardset.policy import Place, Policy, Report
from shardset.storage.local import file_identity, local_path
from shardset.storage.store import UNKNOWN, is_remote, split_query, url_join, url_name, url_scheme
from shardset.storage.threads import map_in_threads

from .files import check_reader
from .learned import load_learned, save_learned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shardset.index.catalog_writer import ShardRow
    from shardset.index.sidecar import Sidecar
    from shardset.index.table import ShardIndex
    from shardset.storage.store import Reader, Store

    from .discover import Found, ShardSource

logger = logging.getLogger(__name__)

TEXT_INDEX_SUFFIXES: Final = (".idx", ".index", ".tfindex")
"""What the text index of a TFRecord shard may be called beside it; ``shardset index --text-index`` writes the first."""
CATALOG_FOLDER: Final = ".shardset"
"""The folder beside the shards in which ``shardset index`` puts the catalog."""


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """What is read into an index beyond the headers.

    Attributes:
        captions: Read the text of ``.json`` and ``.txt`` members beside payloads.
        geometry: Read the pixel size of images.
        metadata: Folder of the sidecar indexes; None where they stand beside their shards.
    """

    captions: bool = False
    geometry: bool = False
    metadata: str | None = None

    def sidecar_url(self, shard: ShardSource) -> str:
        """Return where the sidecar index of a shard is looked for."""
        return sidecar_path(shard.url) if self.metadata is None else url_join(self.metadata, f"{shard.name}.json")


def catalog_beside(found: Found) -> Path | None:
    """Return where the catalog beside the shards would be, or None if the shards are not on this machine's disks."""
    if url_scheme(found.root) not in {"", "file"}:
        return None
    return Path(local_path(found.root)) / CATALOG_FOLDER


def catalog_in_cache(found: Found, options: IndexOptions) -> Path:
    """Return where in the cache the catalog of these shards belongs.

    That of a folder stays where it is when shards come and go, so that those that stay are not indexed again.
    """
    root = os.path.abspath(local_path(found.root)) if url_scheme(found.root) in {"", "file"} else found.root  # noqa: PTH100 - links stay as named
    names = [] if found.is_folder else [shard.name for shard in found.shards]
    listed = "\n".join([root, without_secrets(options.metadata or ""), *names])
    return cache_root() / "catalogs" / hashlib.sha256(listed.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def find_catalog(found: Found, options: IndexOptions, report: Report) -> Catalog | None:
    """Return the fresh catalog of these shards that satisfies the options, or None."""
    cached = catalog_in_cache(found, options)
    for folder in _folders(found, options):
        catalog = _open(folder, report)
        if catalog is None or not satisfies(catalog, options):
            continue
        try:
            if is_fresh(catalog, found.shards, options):
                return catalog
            if folder != cached and _is_outdated(catalog, found):
                report.add("stale_catalog", Place(str(folder)))
                logger.warning("the catalog %s is stale and not used; refresh it with: shardset index", folder)
        except IndexFileError as error:
            _distrust(folder, error, report)
    return None


def _folders(found: Found, options: IndexOptions) -> list[Path]:
    """Return where catalogs of these shards may be, the preferred first."""
    folders = [catalog_in_cache(found, options)]
    if options.metadata is None:
        beside = catalog_beside(found)
        if beside is not None:
            folders.insert(0, beside)
    elif url_scheme(options.metadata) in {"", "file"}:  # what stands beside the shards was made with other indexes
        folders.insert(0, Path(local_path(options.metadata)) / CATALOG_FOLDER)
    return folders


def satisfies(catalog: Catalog, options: IndexOptions) -> bool:
    """Tell whether a catalog holds all that the options ask for."""
    manifest = catalog.manifest
    return manifest.captions >= options.captions and manifest.geometry >= options.geometry


def sidecar_identity(url: str) -> str | None:
    """Return the identity of a sidecar index as it is now: ``""`` if there is none, None if it is elsewhere.

    One that is elsewhere is not looked at, since that would be a request for every shard each time.
    """
    if url_scheme(url) not in {"", "file"}:
        return None
    try:
        return file_identity(os.stat(local_path(url)))  # noqa: PTH116 - half the time of Path.stat
    except OSError:
        return ""


def is_fresh(catalog: Catalog, shards: Sequence[ShardSource], options: IndexOptions) -> bool:
    """Tell whether a catalog describes exactly these shards, as they are now and where they are now.

    Raises:
        IndexFileError: A file of the catalog is missing or malformed.
    """
    catalog.check_files()
    if catalog.num_shards != len(shards):
        return False
    known = (entry for number in range(catalog.num_groups) for entry in catalog.entries(number))
    may_have_moved = catalog.manifest.base is None
    return all(
        entry.size == shard.info.size
        and shard.info.identity != UNKNOWN
        and entry.identity == shard.info.identity
        and entry.name == shard.name
        and not (may_have_moved and entry.url != _whole_url(shard.url))
        and entry.sidecar in {None, sidecar_identity(options.sidecar_url(shard))}
        for entry, shard in zip(known, shards, strict=True)
    )


def _is_outdated(catalog: Catalog, found: Found) -> bool:
    """Tell whether a catalog that is not fresh should be: one of other shards of the folder may lie there too."""
    if found.is_folder:
        return True
    entries = (entry for number in range(catalog.num_groups) for entry in catalog.entries(number))
    known = {entry.name: (entry.size, entry.identity) for entry in entries}
    seen = {shard.name: (shard.info.size, shard.info.identity) for shard in found.shards}
    return any(known.get(name, now) != now for name, now in seen.items())


def _open(folder: Path, report: Report | None) -> Catalog | None:
    try:
        return open_catalog(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (IndexFileError, OSError) as error:
        _distrust(folder, error, report)
        return None


def _distrust(folder: Path, error: Exception, report: Report | None) -> None:
    if report is not None:
        report.add("bad_catalog", Place(str(folder), message=str(error)))
        logger.warning("a catalog is not used: %s", error)


def build_catalog(
    found: Found,
    folder: Path,
    load: Callable[[ShardSource], ShardIndex],
    *,
    options: IndexOptions,
    policy: Policy,
    report: Report,
) -> Catalog:
    """Index all shards of a dataset, as far as no catalog knows them yet, and write the catalog into `folder`.

    Args:
        found: The shards.
        folder: The catalog's folder; made if missing.
        load: Gives the index of a shard; called from several threads.
        options: What the indexes hold.
        policy: What to do about damaged shards.
        report: Counts faults of shards that another catalog knows.

    Raises:
        FormatError: A shard is damaged, and the policy says to raise.
        StorageError: A shard cannot be read, or the folder cannot be written.
    """
    # find_catalog has told what is wrong
    known = known_rows(reversed(_folders(found, options)), options, None, options.sidecar_url)

    def row_of(shard: ShardSource) -> ShardRow:
        row = known(shard)
        if row is None:
            sidecar = sidecar_identity(options.sidecar_url(shard))  # looked at first: if it changes now, that shows
            index = load(shard)
            return shard_row(index, url=shard.url, name=shard.name, identity=shard.info.identity, sidecar=sidecar)
        settle_row(row, policy, report)
        return row

    def rows() -> Iterable[ShardRow]:
        # What is near keeps the processor busy; what is elsewhere lets it wait, so several are asked at once.
        yield from (map_in_threads if is_remote(found.shards[0].url) else map)(row_of, found.shards)

    return write_catalog(folder, rows(), options=options, root=None)


def known_rows(
    folders: Iterable[Path],
    options: IndexOptions,
    report: Report | None,
    sidecar_url: Callable[[ShardSource], str],
) -> Callable[[ShardSource], ShardRow | None]:
    """Return a look-up of shards that the catalogs in `folders`, though stale as a whole, know as they are now.

    Args:
        folders: Where the catalogs are; a later one comes before an earlier one.
        options: What they must hold.
        report: Counts catalogs that cannot be read; None to pass over them.
        sidecar_url: Gives the place of a shard's sidecar index.
    """
    places: dict[tuple[str, int, str, str | None], tuple[Catalog, int]] = {}
    for folder in folders:
        catalog = _open(folder, report)
        if catalog is None or not satisfies(catalog, options):
            continue
        try:
            catalog.check_files()
        except IndexFileError as error:
            _distrust(folder, error, report)
            continue
        for number, first in enumerate(catalog.shard_starts[:-1]):
            for at, entry in enumerate(catalog.entries(number)):
                places[entry.name, entry.size, entry.identity, entry.sidecar] = (catalog, first + at)

    def look_up(shard: ShardSource) -> ShardRow | None:
        known = (shard.name, shard.info.size, shard.info.identity)
        place = places.get((*known, sidecar_identity(sidecar_url(shard)))) or places.get((*known, None))
        if place is None or shard.info.identity == UNKNOWN:
            return None
        return replace(row_from_catalog(*place), url=shard.url)

    return look_up


def settle_row(row: ShardRow, policy: Policy, report: Report) -> None:
    """Apply the policy to what is wrong with a shard that a catalog, made under another one perhaps, knows.

    Raises:
        FormatError: The policy says to raise.
    """
    settle_faults(tuple(Fault(**fault) for fault in row.faults), row.url, policy, report)


def write_catalog(folder: Path, rows: Iterable[ShardRow], *, options: IndexOptions, root: str | None) -> Catalog:
    """Write the catalog of some shards into `folder` and open it.

    Args:
        folder: The catalog's folder; made if missing.
        rows: The shards, in order.
        options: What was read into the rows.
        root: The folder that holds the shards and `folder` itself, to make their urls relative, so that the whole can
            be moved; None to keep the urls whole.

    Raises:
        StorageError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        token = f"captions={options.captions} geometry={options.geometry}"
        groups = tuple(
            write_group(folder, [_relative(row, root) for row in group], options=token) for group in split_groups(rows)
        )
        base = None if root is None else os.path.relpath(local_path(root), folder)
        write_manifest(folder, Manifest(groups, base, options.captions, options.geometry))
    except OSError as error:
        if isinstance(error, ShardsetError):
            raise
        raise StorageError(
            f"the catalog cannot be written ({error.strerror or error})",
            url=str(folder),
            hint="free some space, or set SHARDSET_CACHE to a folder that can be written",
        ) from error
    return open_catalog(folder)


def _relative(row: ShardRow, root: str | None) -> ShardRow:
    if root is None:
        return replace(row, url=_whole_url(row.url))
    return replace(row, url=os.path.relpath(local_path(row.url), local_path(root)).replace(os.sep, "/"))


def _whole_url(url: str) -> str:
    """Return a url as a catalog keeps it: a path from the root on, and nothing that lets anybody in."""
    return without_secrets(url) if url_scheme(url) else str(Path(url).absolute())


def load_index(
    shard: ShardSource,
    store: Store,
    *,
    options: IndexOptions,
    policy: Policy,
    report: Report,
    sidecars: Store | None = None,
    is_here: bool = False,
) -> ShardIndex:
    """Return the index of one shard: from its sidecar index if that is good, else from its headers.

    What was read from the headers of a shard elsewhere is kept in the user's cache, and taken from there next time.

    Args:
        shard: The shard.
        store: Where it is read.
        options: What to read beyond headers.
        policy: What to do about damage.
        report: Counts faults.
        sidecars: Where its sidecar index is read; by default `store`.
        is_here: The shard is cached. Then an index that was learned of it comes before asking for a sidecar index, so
            that no network is needed.

    Raises:
        ChangedError: The shard is no longer what `shard` says.
        FormatError: It is damaged, and the policy says to raise.
        StorageError: It cannot be read.
    """
    learned = load_learned(shard.info, captions=options.captions, geometry=options.geometry) if is_here else None
    if learned is not None:
        settle_faults(learned.faults, shard.url, policy, report)
        return learned
    sidecar = load_sidecar(shard, sidecars or store, url=options.sidecar_url(shard), report=report)
    reader = check_reader(store.open(shard.url, shard.info), shard.info.size, shard.info.identity)
    if sidecar is None and named_format(url_name(shard.url)) == "tfrecord":
        index = _load_text_index(shard, sidecars or store, reader, report)
        if index is not None:
            return index
    if sidecar is not None and sidecar.index.size < shard.info.size:
        index = extend_index(sidecar.index, reader)
        if index is not None:
            report.add("grown_shard", Place(shard.url, sidecar.index.size, message="it has grown since it was indexed"))
            settle_faults(index.faults, shard.url, policy, report)
            return index
    if sidecar is not None and not fits_headers(sidecar.index, reader):
        what = "the index is stale: headers of the shard are not where it says"
        _leave_aside(shard, IndexFileError(what, path=options.sidecar_url(shard), hint="index the shard again"), report)
    elif sidecar is not None:
        has_files = sidecar.index.records is None
        lacks_geometry = options.geometry and has_files and sidecar.index.geometry is None
        lacks_captions = options.captions and has_files and not sidecar.index.captions
        if not lacks_geometry and not lacks_captions:
            settle_faults(sidecar.index.faults, shard.url, policy, report)
            return sidecar.index
    if not is_remote(shard.url):
        return build_index(reader, captions=options.captions, geometry=options.geometry, policy=policy, report=report)
    learned = load_learned(shard.info, captions=options.captions, geometry=options.geometry)
    if learned is not None:
        settle_faults(learned.faults, shard.url, policy, report)
        return learned
    index = build_index(reader, captions=options.captions, geometry=options.geometry, policy=policy, report=report)
    save_learned(shard.info, index, captions=options.captions, geometry=options.geometry)
    return index


def load_sidecar(shard: ShardSource, store: Store, *, url: str, report: Report) -> Sidecar | None:
    """Return the sidecar index of a shard, or None if there is none that is good; a bad one is counted and logged.

    That of a TFRecord shard may be of a smaller size than the shard, which has grown then.
    """
    try:
        reader = store.open(url)
        payload = reader.read(0, reader.size)
    except NotFoundError:
        return None
    except StorageError as error:
        _leave_aside(shard, error, report)
        return None
    try:
        return parse_sidecar(payload, path=url, shard_size=shard.info.size)
    except IndexFileError as error:
        with suppress(IndexFileError):
            earlier = parse_sidecar(payload, path=url)
            form = earlier.index.records
            if form is not None and not form.compression and earlier.index.size < shard.info.size:
                return earlier
        _leave_aside(shard, error, report)
        return None


def _load_text_index(shard: ShardSource, store: Store, reader: Reader, report: Report) -> ShardIndex | None:
    """Return what a text index beside a TFRecord shard says, as DALI and vahidk's tfrecord make them, if it fits."""
    for suffix in TEXT_INDEX_SUFFIXES:
        url = _with_suffix(shard.url, suffix)
        try:
            found = store.open(url)
            index = parse_text_index(found.read(0, found.size), shard.info.size, path=url)
        except NotFoundError:
            continue
        except (IndexFileError, StorageError) as error:
            _leave_aside(shard, error, report)
            continue
        if fits_headers(index, reader):
            return index
        what = "the text index is stale: records of the shard are not where it says"
        _leave_aside(shard, IndexFileError(what, path=url, hint="make it anew"), report)
    return None


def _with_suffix(url: str, suffix: str) -> str:
    path, query = split_query(url) if url_scheme(url) in {"http", "https"} else (url, "")
    return path + suffix + query


def _leave_aside(shard: ShardSource, error: Exception, report: Report) -> None:
    report.add("bad_index", Place(shard.url, message=str(error)))
    logger.warning("a sidecar index is not used: %s", error)
