"""Ten photographs become three tar shards, which are indexed, read at random, read through, and drawn on one sheet.

Run by ``make demo``. With ``--core`` nothing is drawn, so that Pillow is not needed, and every payload is compared with
the file that it came from.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
import tarfile
import tempfile
import time
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import shardset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL import Image, ImageDraw, ImageFont

HERE = Path(__file__).resolve().parent
DATA = HERE / "data"
SHARDS = (4, 3, 3)
"""How many photographs go into each shard."""
IMAGES = ("jpg", "webp", "png")


def make_shards(folder: Path) -> list[Path]:
    """Write the photographs with their captions into tar shards, as any tar program would, and return their paths."""
    samples: dict[str, list[Path]] = {}
    for path in sorted(DATA.glob("0*")):
        samples.setdefault(path.stem, []).append(path)
    keys = iter(samples)
    shards = []
    folder.mkdir(parents=True, exist_ok=True)
    for number, count in enumerate(SHARDS):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for _ in range(count):
                for path in samples[next(keys)]:
                    payload = path.read_bytes()
                    member = tarfile.TarInfo(path.name)
                    member.size = len(payload)
                    tar.addfile(member, io.BytesIO(payload))
        shard = folder / f"photos-{number:05d}.tar"
        # Left alone where it is there already, so that a second run finds the index still good.
        if not shard.exists() or shard.read_bytes() != buffer.getvalue():
            shard.write_bytes(buffer.getvalue())
        shards.append(shard)
    return shards


def print_samples(ds: shardset.Dataset) -> None:
    """Print what the index knows of every sample: no payload is read for it."""
    print(f"  {'#':>2}  {'key':<15} {'fields':<10} {'bytes':>7}  {'pixels':<8} caption")
    for sample in ds:
        pixels = "{}x{}".format(*sample.size) if sample.size else ""
        fields, caption = " ".join(sample.fields), sample.caption or ""
        print(
            f"  {sample.sample_index:>2}  {sample.key:<15} {fields:<10} {sum(sample.sizes):>7}  {pixels:<8} {caption}"
        )


def image_field(sample: shardset.Sample) -> str:
    """Return which field of a sample is its image."""
    return next(field for field in sample.fields if field in IMAGES)


def read_at_random(ds: shardset.Dataset, count: int) -> None:
    """Read the images of some samples in an order that nobody could foresee, and print how long each took."""
    for index in random.Random(7).sample(range(len(ds)), count):  # noqa: S311 - no secret
        start = time.perf_counter()
        sample = ds[index]
        field = image_field(sample)
        payload = sample[field]
        elapsed = time.perf_counter() - start
        where = sample.byte_range(field)
        shard = Path(sample.shard).name
        print(
            f"  ds[{index}][{field!r}]".ljust(17),
            f"{len(payload):>6} bytes of {shard} from byte {where.offset:<7} in {elapsed * 1e6:4.0f} microseconds",
        )


def read_all(ds: shardset.Dataset) -> None:
    """Read every payload of every sample in order."""
    start = time.perf_counter()
    sizes = [sum(len(sample[field]) for field in sample if field != "__key__") for sample in ds.iter_dicts()]
    elapsed = time.perf_counter() - start
    print(f"  {len(sizes)} samples, {sum(sizes):,} bytes in {elapsed * 1e3:.1f} milliseconds")


def stream(shards: list[Path]) -> None:
    """Go through the shards as a stream, in random order; break off in the middle, and go on elsewhere."""

    def pipeline() -> shardset.WebDataset:
        return shardset.WebDataset(shards, shardshuffle=True).shuffle(5)

    whole = [sample["__key__"] for sample in pipeline()]
    first, second = pipeline(), pipeline()
    begun = [sample["__key__"] for sample in islice(first, 4)]
    second.load_state_dict(first.state_dict())
    rest = [sample["__key__"] for sample in second]
    if begun + rest != whole:
        raise SystemExit(f"the stream went on wrongly: {begun} and {rest} are not {whole}")
    print(f"  {', '.join(begun)} ... broken off, and gone on with from its state:")
    print(f"  {', '.join(rest)}")
    print(f"  left out: {second.report()}")


def compare_with_files(ds: shardset.Dataset) -> None:
    """Compare every payload, read one by one and all together, with the file that went into the shard.

    Raises:
        SystemExit: They differ.
    """
    count = 0
    for sample, whole in zip(ds, ds.iter_dicts(), strict=True):
        for field in sample.fields:
            content = (DATA / f"{sample.key}.{field}").read_bytes()
            if not sample[field] == whole[field] == sample.view(field) == content:
                sys.exit(f"{sample.key}.{field} came out of {sample.shard} other than it went in")
            count += 1
    print(f"  {count} payloads are the files that went in, byte for byte")


# ---- the contact sheet

WIDTH, MARGIN, GAP = 1160, 40, 16
PAPER, INK, GREY = (250, 249, 246), (34, 34, 34), (125, 122, 116)


def draw_sheet(ds: shardset.Dataset, path: Path) -> None:
    """Draw all images on one sheet, a row for each shard, with key and caption beneath.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise shardset.MissingExtraError("the contact sheet is drawn with Pillow", extra="images") from error

    fonts = {size: ImageFont.load_default(size) for size in (13, 15, 16, 30)}
    sheet = Image.new("RGB", (WIDTH + 2 * MARGIN, 4000), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), "Ten photographs out of three tar shards", INK, fonts[30])
    y = MARGIN + 64
    for shard in range(ds.num_shards):
        samples = [sample for sample in ds if sample.shard_index == shard]
        label = f"{Path(ds.shard_url(shard)).name}   samples {samples[0].sample_index} to {samples[-1].sample_index}"
        draw.text((MARGIN, y), label, GREY, fonts[13])
        y = draw_row(sheet, draw, samples, y + 26, fonts) + 34
    sheet.crop((0, 0, sheet.width, y - 34 + MARGIN)).save(path)


def draw_row(
    sheet: Image.Image,
    draw: ImageDraw.ImageDraw,
    samples: list[shardset.Sample],
    y: int,
    fonts: dict[int, ImageFont.FreeTypeFont],
) -> int:
    """Draw samples beside each other, as large as fills the width, and return where the row ends."""
    images = [open_upright(sample) for sample in samples]
    room = WIDTH - GAP * (len(images) - 1)
    exact = room / sum(image.width / image.height for image in images)
    height = round(exact)
    x, end = float(MARGIN), y
    for sample, image in zip(samples, images, strict=True):
        width = exact * image.width / image.height
        left, right = round(x), round(x + width)
        sheet.paste(image.resize((right - left, height)), (left, y))
        draw.text((left, y + height + 10), sample.key, INK, fonts[16])
        line = y + height + 34
        for text in wrap(sample.caption or "", right - left, fonts[15]):
            draw.text((left, line), text, GREY, fonts[15])
            line += 20
        end = max(end, line)
        x += width + GAP
    return end


def open_upright(sample: shardset.Sample) -> Image.Image:
    """Decode a sample's image and turn it as its EXIF orientation says."""
    from PIL import Image, ImageOps

    with sample.open(image_field(sample)) as file:
        return ImageOps.exif_transpose(Image.open(file)).convert("RGB")


def wrap(text: str, width: int, font: ImageFont.FreeTypeFont) -> Iterator[str]:
    """Break a text into lines of at most `width` pixels."""
    line = ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if line and font.getlength(longer) > width:
            yield line
            longer = word
        line = longer
    if line:
        yield line


# ---- the program


def run(out: Path, *, core: bool) -> None:
    """Do all of it, and say so."""
    shards = make_shards(out / "shards")
    print(f"Made {len(shards)} shards of ten photographs in {shown(out / 'shards')}")

    index_dataset = shardset.index_dataset  # loads numpy and Arrow, once, which is no part of the work
    start = time.perf_counter()
    result = index_dataset(out / "shards", geometry=True)
    elapsed = time.perf_counter() - start
    again = f", {result.shards_reused} shards unchanged since the last time" if result.shards_reused else ""
    print(f"Indexed {result.catalog.num_samples} samples in {elapsed * 1e3:.0f} milliseconds{again}")

    ds = shardset.discover_dataset(out / "shards")
    print("\nWhat the index knows:")
    print_samples(ds)
    print("\nAny sample, at once:")
    read_at_random(ds, 5)
    print("\nAll of them, in order:")
    read_all(ds)
    print("\nAs a stream, shuffled:")
    stream(shards)
    if core:
        compare_with_files(ds)
        return

    sheet = out / "contact-sheet.png"
    draw_sheet(ds, sheet)
    print(f"\nDrew them all on {shown(sheet)}")
    shard = quote(shown(shards[0]))
    print(
        "\nNext (with .venv/bin on your PATH):",
        f"shardset ls {shard}",
        f"shardset show {shard}#0002-rocket",
        f"shardset cat {shard}#0002-rocket.jpg > rocket.jpg",
        f"shardset stats {quote(shown(out / 'shards'))}",
        sep="\n  ",
    )


def shown(path: Path) -> str:
    """Return a path as one would type it here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the shards and the sheet (examples/out)")
    parser.add_argument("--core", action="store_true", help="draw nothing, and compare payloads with their files")
    arguments = parser.parse_args()
    try:
        if arguments.core and arguments.out is None:
            with tempfile.TemporaryDirectory() as folder:
                run(Path(folder), core=True)
        else:
            run((arguments.out or HERE / "out").resolve(), core=arguments.core)
    except shardset.ShardsetError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
