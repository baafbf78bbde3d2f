"""Indexing whole shards with their JSON sidecars, two at a time, beside webshart's `MetadataExtractor`."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

import webshart
from corpus import small
from measure import Result, Side, check, compare, quiet

from shardset import index_dataset
from shardset.tasks import extract_indexes

if TYPE_CHECKING:
    from pathlib import Path


def run(root: Path, *, quick: bool) -> list[Result]:
    corpus = small(quick=quick)
    source = corpus.make(root)
    mine, theirs = root / "extracted-ours", root / "extracted-webshart"
    common = {"unit": "members", "count": 3 * corpus.num_samples}
    results = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shardset.tasks"])
    with ProcessPoolExecutor(2, context) as pool:
        list(pool.map(abs, range(64)))  # starts both

        def ours(*, sidecars: bool, geometry: bool) -> None:
            if sidecars and geometry:  # what webshart's call makes, and no more
                extract_indexes(source, destination=mine, geometry=True, force=True, executor=pool)
            else:
                index_dataset(source, destination=mine, sidecars=sidecars, geometry=geometry, force=True, executor=pool)

        def peer(*, geometry: bool) -> None:
            with quiet():
                webshart.MetadataExtractor().extract_metadata(
                    str(source), f"{theirs}/", max_workers=2, include_image_geometry=geometry
                )

        for geometry in (False, True):
            and_geometry = " and image sizes" if geometry else ""
            _empty(mine)
            _empty(theirs)
            ours(sidecars=True, geometry=geometry)
            peer(geometry=geometry)
            _check_same(mine, theirs)
            for sidecars in (True, False):
                output = "JSON indexes" if sidecars else "the catalog alone"
                goal = 10.0 if not sidecars else 4.5 if geometry else 5.0
                alone = sidecars and geometry
                call = "extract_indexes(" if alone else f"index_dataset({sidecars=}, "
                results.append(
                    compare(
                        f"shards with JSON sidecars{and_geometry} to {output}",
                        Side(
                            f"{call}{geometry=}, executor=pool of 2 processes)",
                            lambda sidecars=sidecars, geometry=geometry: ours(sidecars=sidecars, geometry=geometry),
                            lambda: _empty(mine),
                        ),
                        Side(
                            f"MetadataExtractor().extract_metadata(max_workers=2, include_image_geometry={geometry})",
                            lambda geometry=geometry: peer(geometry=geometry),
                            lambda: _empty(theirs),
                        ),
                        delivers="webshart: JSON indexes without flushing; ours: "
                        + ("a catalog, which is another output" if not sidecars else "JSON indexes")
                        + (" and a catalog" if sidecars and not alone else "")
                        + ", flushed to the disk",
                        goal=goal,
                        **common,
                    )
                )
    for folder in (mine, theirs):
        shutil.rmtree(folder)
    return results


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.sync()  # nothing of the round before is left to be flushed in this one


def _check_same(mine: Path, theirs: Path) -> None:
    """Compare the entries of every index file, but for what ours alone has, and for how single floats are printed."""
    for path in sorted(theirs.glob("*.json")):
        peer, ours = (json.loads((folder / path.name).read_bytes()) for folder in (theirs, mine))
        check(peer["filesize"] == ours["filesize"], f"{path.name}: filesize")
        check(_plain(peer["files"]) == _plain(ours["files"]), f"{path.name}: files")


def _plain(files: dict[str, Any]) -> dict[str, Any]:
    for entry in files.values():
        entry.pop("orientation", None)
        if "aspect" in entry:
            entry["aspect"] = round(entry["aspect"], 5)
    return files
