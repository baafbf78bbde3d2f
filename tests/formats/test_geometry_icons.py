"""The geometry of icons, against Pillow."""

from __future__ import annotations

import io
import struct

import pytest

from shardset.formats.geometry import Geometry, parse_geometry
from shardset.formats.geometry_reach import geometry_reach


def icon(*sizes, planes=1):
    """An icon file with a picture of each size, in the order given."""
    from PIL import Image

    pictures = []
    for size in sizes:
        file = io.BytesIO()
        Image.new("RGBA", size, "red").save(file, "PNG")
        pictures.append(file.getvalue())
    directory, at = struct.pack("<HHH", 0, 1, len(sizes)), 6 + 16 * len(sizes)
    for (width, height), picture in zip(sizes, pictures, strict=True):
        directory += struct.pack("<BBBBHHII", width % 256, height % 256, 0, 0, planes, 32, len(picture), at)
        at += len(picture)
    return directory + b"".join(pictures)


@pytest.mark.parametrize(
    ("sizes", "largest"),
    [
        ([(16, 16)], (16, 16)),
        ([(16, 16), (48, 48), (32, 32)], (48, 48)),
        ([(48, 48), (16, 16)], (48, 48)),
        ([(16, 16), (256, 256), (128, 128)], (256, 256)),
        ([(20, 40), (30, 10)], (20, 40)),
        ([(255, 3), (30, 30)], (30, 30)),
        ([(256, 1), (1, 255)], (256, 1)),
    ],
)
@pytest.mark.parametrize("planes", [0, 1])
def test_an_icon_file_has_the_size_of_its_largest_picture_as_in_pillow(sizes, largest, planes):
    from PIL import Image

    payload = icon(*sizes, planes=planes)
    assert parse_geometry(payload) == Geometry("ico", *largest)
    assert Image.open(io.BytesIO(payload)).size == largest
    reach = geometry_reach(payload[:64], len(payload))
    assert parse_geometry(payload[: max(64, reach)]) == Geometry("ico", *largest)


def test_icons_that_pillow_writes_are_understood():
    from PIL import Image

    for options in ({}, {"bitmap_format": "bmp"}):
        file = io.BytesIO()
        Image.new("RGB", (200, 100)).save(file, "ICO", sizes=[(16, 16), (48, 40), (256, 256)], **options)
        assert parse_geometry(file.getvalue()) == Geometry("ico", *Image.open(file).size)


def test_a_directory_that_is_cut_off_has_no_geometry():
    payload = icon((16, 16), (48, 48), (32, 32))
    found = [parse_geometry(payload[:length]) for length in range(len(payload))]
    assert found[: 6 + 48] == [None] * 54
    assert set(found[54:]) == {Geometry("ico", 48, 48)}


@pytest.mark.parametrize(("place", "value"), [(2, 2), (4, 0), (5, 1), (9, 7), (10, 2), (11, 1)])
def test_what_only_begins_like_an_icon_has_no_geometry(place, value):
    payload = bytearray(icon((16, 16)))
    payload[place] = value
    assert parse_geometry(payload) is None
