"""The shards that are read here: made once, the same bytes each time, as Python's `tarfile` writes them."""

from __future__ import annotations

import io
import json
import random
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_PHOTOS: Final = Path(__file__).parent.parent / "examples" / "data"
_TEXT: Final = "a quiet photograph of an old red boat under the bridge near a market on a bright winter morning"
_BLOCK: Final = 512


@dataclass(frozen=True, slots=True)
class Corpus:
    """Shards of samples with three members: ``jpg``, ``json`` with a caption, ``cls``.

    Attributes:
        name: What its folder is called.
        shards: How many shards.
        samples: Samples in each shard.
        image_bytes: Mean bytes of the ``jpg`` payloads, which have half to one and a half of it.
        pax: Whether a PAX header with the time stamp stands before every member, as webdataset's writer makes them.
    """

    name: str
    shards: int
    samples: int
    image_bytes: int
    pax: bool = False

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return self.shards * self.samples

    def make(self, root: Path) -> Path:
        """Return the folder of the shards below `root`, making them if they are not there, and read them once."""
        folder = root / f"{self.name}-{self.shards}x{self.samples}"
        if not folder.exists():
            print(f"making {folder}", flush=True)
            part = root / f".{folder.name}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            for shard in range(self.shards):
                self._write_shard(part / f"shard-{shard:05d}.tar", shard)
            part.rename(folder)
        for path in sorted(folder.glob("*.tar")):
            path.read_bytes()  # the page cache is warm from here on
        return folder

    def _write_shard(self, path: Path, shard: int) -> None:
        chance = random.Random(shard)  # noqa: S311 - noise, not a secret
        noise = chance.randbytes(2 * self.image_bytes + (1 << 17)).replace(b"\xff", b"\xfe")
        headers = [_header(photo) for photo in sorted(_PHOTOS.glob("*.jpg"))]
        words = _TEXT.split()
        kind = tarfile.PAX_FORMAT if self.pax else tarfile.USTAR_FORMAT
        with path.open("wb") as file:
            for number in range(shard * self.samples, (shard + 1) * self.samples):
                width, height = chance.randrange(64, 512), chance.randrange(64, 512)
                head, sizes_at = headers[number % len(headers)]
                head = head[:sizes_at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + head[sizes_at + 4 :]
                length = chance.randrange(self.image_bytes // 2, self.image_bytes * 3 // 2) - len(head) - 2
                start = chance.randrange(len(noise) - length)
                caption = " ".join(chance.sample(words, len(words)))
                payloads = {
                    "jpg": head + noise[start : start + length] + b"\xff\xd9",
                    "json": json.dumps({"caption": caption, "id": number}).encode(),
                    "cls": b"%d" % chance.randrange(1000),
                }
                for suffix, payload in payloads.items():
                    member = tarfile.TarInfo(f"{number:09d}.{suffix}")
                    member.size = len(payload)
                    member.mtime = 1_700_000_000.25 if self.pax else 1_700_000_000
                    file.write(member.tobuf(kind) + payload + bytes(-len(payload) % _BLOCK))
            file.write(bytes(2 * _BLOCK))


def _header(photo: Path) -> tuple[bytes, int]:
    """Return a photograph's bytes up to its first scan, and where height and width stand in them."""
    raw = photo.read_bytes()
    at, sizes_at = 2, 0
    while raw[at + 1] != 0xDA:
        if raw[at + 1] == 0xC0:
            sizes_at = at + 5
        at += 2 + int.from_bytes(raw[at + 2 : at + 4], "big")
    return raw[: at + 2 + int.from_bytes(raw[at + 2 : at + 4], "big")], sizes_at


@dataclass(frozen=True, slots=True)
class Indexed:
    """Shards of tiny images whose indexes, as webshart writes them, say sizes in pixels: one shard under many names."""

    shards: int
    samples: int = 5000

    @property
    def num_samples(self) -> int:
        """Samples in all shards, of one file each."""
        return self.shards * self.samples

    def make(self, root: Path) -> Path:
        """Return the folder of the shards below `root`, making them if they are not there."""
        folder = root / f"indexed-{self.shards}x{self.samples}"
        if folder.exists():
            return folder
        print(f"making {folder}", flush=True)
        part = root / f".{folder.name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        chance = random.Random(0)  # noqa: S311 - noise, not a secret
        entries: dict[str, dict[str, Any]] = {}
        shard, index = part / "s-00000.tar", part / "s-00000.json"
        with tarfile.open(shard, "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(self.samples):
                member = tarfile.TarInfo(f"{number:09d}.jpg")
                member.size = chance.randrange(1, _BLOCK)
                width, height = chance.randrange(64, 2048), chance.randrange(64, 2048)
                tar.addfile(member, io.BytesIO(bytes(member.size)))
                place = {"path": member.name, "offset": member.offset_data, "length": member.size}
                entries[member.name] = {**place, "width": width, "height": height, "aspect": single(width / height)}
        with tarfile.open(shard) as tar:  # which has found out where the payloads are
            for member in tar:
                entries[member.name]["offset"] = member.offset_data
        size = shard.stat().st_size
        document = {"path": shard.name, "filesize": size, "includes_image_geometry": True, "files": entries}
        index.write_text(json.dumps(document, separators=(",", ":")))
        for number in range(1, self.shards):
            (part / f"s-{number:05d}.tar").hardlink_to(shard)
            (part / f"s-{number:05d}.json").hardlink_to(index)
        part.rename(folder)
        return folder


def single(value: float) -> float:
    """Return a number as single precision has it, in the fewest digits."""
    import numpy as np  # noqa: PLC0415 - the other corpora do without

    return float(str(np.float32(value)))


def million(*, quick: bool) -> Indexed:
    """Return the corpus of a million samples with indexes."""
    return Indexed(20 if quick else 200)


def small(*, quick: bool, pax: bool = False) -> Corpus:
    """Return the corpus of 10 KB images."""
    return Corpus("pax" if pax else "ustar", 2 if quick else 8, 5000, 10_000, pax)


def large(*, quick: bool) -> Corpus:
    """Return the corpus of 100 KB images."""
    return Corpus("large", 2 if quick else 8, 1000, 100_000)
