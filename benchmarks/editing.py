"""Renaming a field in the indexes of a hundred shards, and gathering captions into them, beside webshart."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import random
import shutil
import tarfile
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

import webshart
from measure import Result, Side, check, compare, quiet

from shardset.dataset.opening import discover_dataset
from shardset.dataset.rewriting import coalesce_captions, rename_field

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from pathlib import Path

_SAMPLES = 1000
_TEXT = "a quiet photograph of an old red boat under the bridge near a market on a bright winter morning"


def run(root: Path, *, quick: bool) -> list[Result]:
    shards = 10 if quick else 100
    source = _make(root, shards)
    mine, theirs = root / "edited-ours", root / "edited-webshart"
    for folder in (mine, theirs):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for path in source.glob("*.tar"):
            (folder / path.name).hardlink_to(path)
        _copy_indexes(source, folder)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shardset.dataset.rewriting"])
    with ProcessPoolExecutor(2, context) as pool:
        list(pool.map(abs, range(64)))  # starts both
        results = []
        for executor, how in ((None, ""), (pool, ", executor=pool of 2 processes")):
            common = {"unit": "samples", "count": shards * _SAMPLES, "goal": 2.0}
            results += [
                _rename((source, mine, theirs), executor, how, common),
                _gather((source, mine, theirs), executor, how, common),
            ]
    for folder in (mine, theirs):
        shutil.rmtree(folder)
    return results


def _rename(folders: tuple[Path, Path, Path], executor: Executor | None, how: str, common: dict[str, Any]) -> Result:
    source, mine, theirs = folders

    def ours() -> int:
        return rename_field(discover_dataset(mine), "captions", "v1_captions", executor=executor)

    def peer() -> int:
        return webshart.discover_dataset(str(theirs)).field_rename("captions", "v1_captions")

    check(ours() == peer(), "entries renamed")
    _check_same(mine, theirs)
    return compare(
        f"rename a field in the JSON index of each shard{' over processes' if how else ''}",
        Side(f"rename_field(discover_dataset(folder), old, new{how})", ours, lambda: _copy_indexes(source, mine)),
        Side("discover_dataset(folder).field_rename(old, new)", peer, lambda: _copy_indexes(source, theirs)),
        delivers="all indexes checked, then all replaced; ours flushed to the disk, webshart's not",
        **common,
    )


def _gather(folders: tuple[Path, Path, Path], executor: Executor | None, how: str, common: dict[str, Any]) -> Result:
    source, mine, theirs = folders
    for folder in (mine, theirs):
        _copy_indexes(source, folder)
    outputs = mine.with_name("coalesced-ours"), mine.with_name("coalesced-webshart")

    def ours() -> int:
        return coalesce_captions(discover_dataset(mine), outputs[0], executor=executor)["coalesced_samples"]

    def peer() -> int:
        loader = webshart.TarDataLoader(webshart.discover_dataset(str(theirs)), load_file_data=False)
        return loader.coalesce_caption_metadata(str(outputs[1]))["coalesced_samples"]

    check(ours() == peer(), "captions gathered")
    _check_same(*outputs)
    result = compare(
        f"gather the captions of text sidecars into the JSON index of each shard{' over processes' if how else ''}",
        Side(f"coalesce_captions(discover_dataset(folder), destination{how})", ours, lambda: _remove(outputs[0])),
        Side("loader.coalesce_caption_metadata(destination)", peer, lambda: _remove(outputs[1])),
        delivers="500 captions a shard; ours checked against headers, and flushed to the disk",
        **common,
    )
    for folder in outputs:
        shutil.rmtree(folder)
    return result


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()


def _make(root: Path, shards: int) -> Path:
    """Return a folder of shards, half of whose samples have JSON sidecars and half text, with webshart's indexes."""
    folder = root / f"captioned-{shards}x{_SAMPLES}"
    if folder.exists():
        return folder
    print(f"making {folder}", flush=True)
    part = root / f".{folder.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    words = _TEXT.split()
    for shard in range(shards):
        chance = random.Random(shard)  # noqa: S311 - noise, not a secret
        with tarfile.open(part / f"shard-{shard:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(shard * _SAMPLES, (shard + 1) * _SAMPLES):
                caption = " ".join(chance.sample(words, len(words)))
                suffix, sidecar = (
                    ("txt", caption) if number % 2 else ("json", json.dumps({"caption": caption, "id": number}))
                )
                for name, payload in (("jpg", chance.randbytes(64)), (suffix, sidecar.encode())):
                    member = tarfile.TarInfo(f"{number:09d}.{name}")
                    member.size = len(payload)
                    tar.addfile(member, io.BytesIO(payload))
    with quiet():
        webshart.MetadataExtractor().extract_metadata(str(part), f"{part}/")
    part.rename(folder)
    return folder


def _copy_indexes(source: Path, folder: Path) -> None:
    for path in source.glob("*.json"):
        shutil.copy(path, folder)
    os.sync()  # nothing of the round before is left to be flushed in this one


def _check_same(mine: Path, theirs: Path) -> None:
    for path in sorted(theirs.glob("*.json")):
        peer, ours = (json.loads((folder / path.name).read_bytes()) for folder in (theirs, mine))
        check(peer["files"] == ours["files"], f"{path.name}: files")
