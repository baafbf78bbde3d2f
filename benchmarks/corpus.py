"""The shards that are read here: made once, the same bytes each time, as Python's `tarfile` writes them."""

from __future__ import annotations

import json
import random
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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


def small(*, quick: bool, pax: bool = False) -> Corpus:
    """Return the corpus of 10 KB images."""
    return Corpus("pax" if pax else "ustar", 2 if quick else 8, 5000, 10_000, pax)


def large(*, quick: bool) -> Corpus:
    """Return the corpus of 100 KB images."""
    return Corpus("large", 2 if quick else 8, 1000, 100_000)
