"""Images of batches: as Pillow has them, turned once, of the shape that the index says, whatever a header claims."""

from __future__ import annotations

import io
import random
import struct
import sys
import threading
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.picture_builder import encode, find_mark, imir, irot, marked, turn, turned_codestream, with_properties
from shardset.decoding import batch_images as module
from shardset.decoding.batch_images import ImageBatch, Target, decode_shaped
from shardset.decoding.batches import BatchDecoder
from shardset.decoding.images import decode_image, find_spec
from shardset.decoding.options import CHANNELS, Decode
from shardset.decoding.slabs import Slabs
from shardset.errors import DecodeError
from shardset.formats.geometry import parse_geometry

PHOTOGRAPHS = sorted((Path(__file__).parents[2] / "examples" / "data").glob("*.jpg"))
BICUBIC = PIL.Image.Resampling.BICUBIC


def encoded(image, kind="JPEG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def photograph(size=(61, 47), mode="RGB", number=0):
    with PIL.Image.open(PHOTOGRAPHS[number]) as image:
        return image.convert("RGB").resize(size).convert(mode)


def batch_of(payloads, options=None, shape=None):
    return ImageBatch(options or Decode(), payloads, shape, Slabs())


def decoded(payloads, options=None, shape=None, seeds=None):
    batch = batch_of(payloads, options, shape)
    for place, payload in enumerate(payloads):
        batch.decode(place, payload, seeds[place] if seeds else place)
    return batch.finish()


def opened(payload, mode="RGB"):
    with PIL.Image.open(io.BytesIO(payload)) as image:
        return image.convert(mode)


def with_axis(image):
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[:, :, np.newaxis]


PAYLOADS = {
    "jpeg": lambda: encoded(photograph()),
    "progressive": lambda: encoded(photograph(), progressive=True),
    "grey jpeg": lambda: encoded(photograph(mode="L")),
    "cmyk jpeg": lambda: encoded(photograph(mode="CMYK")),
    "rgb jpeg": lambda: encoded(photograph(), keep_rgb=True),
    "png": lambda: encoded(photograph(), "PNG"),
    "grey png": lambda: encoded(photograph(mode="L"), "PNG"),
    "alpha png": lambda: encoded(photograph(mode="RGBA"), "PNG"),
    "palette png": lambda: encoded(photograph(mode="P"), "PNG"),
    "16-bit png": lambda: encoded(PIL.Image.fromarray(np.full((47, 61), 300, np.uint16)), "PNG"),
    "webp": lambda: encoded(photograph(), "WEBP"),
    "gif": lambda: encoded(photograph(), "GIF"),
    "bmp": lambda: encoded(photograph(), "BMP"),
    "tiff": lambda: encoded(photograph(), "TIFF"),
    "ppm": lambda: encoded(photograph(), "PPM"),
    "jpeg 2000": lambda: encoded(photograph(), "JPEG2000"),
    "icon": lambda: encoded(photograph(), "ICO", sizes=[(61, 47)]),
}


@pytest.mark.parametrize("mode", CHANNELS)
@pytest.mark.parametrize("make", PAYLOADS.values(), ids=PAYLOADS)
def test_without_a_size_pixels_are_those_of_pillow(make, mode):
    payload = make()
    pixels = decoded([payload, memoryview(payload)], Decode(mode=mode))
    wanted = with_axis(opened(payload, mode.upper()))
    assert pixels.shape == (2, *wanted.shape)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert np.array_equal(pixels[0], wanted)
    assert np.array_equal(pixels[1], wanted)
    alone = decode_image(payload, find_spec(f"{mode}8"))
    assert np.array_equal(pixels[0], with_axis(alone))


@pytest.mark.parametrize("path", PHOTOGRAPHS, ids=lambda path: path.stem)
def test_photographs_come_out_as_they_are_shown(path):
    payload = path.read_bytes()
    with PIL.Image.open(path) as image:
        wanted = np.asarray(PIL.ImageOps.exif_transpose(image).convert("RGB"))
    assert np.array_equal(decoded([payload])[0], wanted)


def test_without_simplejpeg_the_pixels_are_the_same(monkeypatch):
    payload = PHOTOGRAPHS[1].read_bytes()
    wanted = decoded([payload])
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    assert np.array_equal(decoded([payload]), wanted)


def test_images_of_several_shapes_become_a_list():
    payloads = [encoded(photograph((30, 20))), encoded(photograph((20, 30)), "PNG")]
    images = decoded(payloads)
    assert isinstance(images, list)
    assert [image.shape for image in images] == [(20, 30, 3), (30, 20, 3)]


def test_images_whose_headers_nobody_knows_still_become_one_array():
    payloads = [encoded(photograph(), "PPM")] * 3
    assert parse_geometry(payloads[0]) is None
    assert decoded(payloads).shape == (3, 47, 61, 3)


# --- turning ---------------------------------------------------------------------------------------------------------

KINDS = ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "HEIF"]


def stored(kind, orientation):
    if kind == "JXL":
        return turned_codestream(encode("JXL", lossless=True), orientation)
    options = {"quality": 95} if kind in {"JPEG", "AVIF", "HEIF"} else {}
    return encode(kind, orientation=orientation, **options)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", [*KINDS, "JXL"])
def test_what_is_decoded_has_the_size_that_the_index_says_and_is_turned_once(kind, orientation):
    payload = stored(kind, orientation)
    geometry = parse_geometry(payload)
    pixels = decoded([payload])
    assert pixels.shape == (1, *geometry.display_size[::-1], 3)
    wanted = turn(marked((geometry.width, geometry.height)), geometry.orientation)
    assert find_mark(PIL.Image.fromarray(pixels[0])) == find_mark(wanted)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_turning_can_be_left_out(kind, orientation):
    pixels = decoded([stored(kind, orientation)], Decode(orient=False))
    assert pixels.shape == (1, 24, 40, 3)
    assert find_mark(PIL.Image.fromarray(pixels[0])) == (False, False)


@pytest.mark.parametrize("turns", [(irot(1),), (irot(2),), (irot(3),), (imir(0),), (irot(1), imir(1))])
@pytest.mark.parametrize("kind", ["AVIF", "HEIF"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_what_the_container_says_wins_over_exif_and_is_done_once(kind, turns, orientation):
    payload = with_properties(stored(kind, orientation), *turns, drop=(b"irot", b"imir"))
    geometry = parse_geometry(payload)
    pixels = decoded([payload])
    assert pixels.shape == (1, *geometry.display_size[::-1], 3)
    wanted = turn(marked((geometry.width, geometry.height)), geometry.orientation)
    assert find_mark(PIL.Image.fromarray(pixels[0])) == find_mark(wanted)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", [*KINDS, "JXL"])
@pytest.mark.parametrize("crop", ["center", "random", "none"])
def test_a_size_is_that_of_the_turned_image(kind, orientation, crop):
    pixels = decoded([stored(kind, orientation)], Decode(size=(20, 12), crop=crop))
    assert pixels.shape == (1, 20, 12, 3)


# --- scaling and cutting ---------------------------------------------------------------------------------------------


def difference(pixels, wanted):
    return float(np.abs(pixels.astype(np.int16) - np.asarray(wanted)).mean())


@pytest.mark.parametrize("path", PHOTOGRAPHS, ids=lambda path: path.stem)
@pytest.mark.parametrize("size", [32, 64, 128, 200, 400, (100, 160)])
def test_a_scaled_jpeg_is_nearly_the_whole_one_scaled(path, size):
    payload = path.read_bytes()
    with PIL.Image.open(path) as image:
        shown = PIL.ImageOps.exif_transpose(image).convert("RGB")
    height, width = Decode(size=size).shape
    wanted = PIL.ImageOps.fit(shown, (width, height), BICUBIC)
    assert difference(decoded([payload], Decode(size=size))[0], wanted) < 1


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos", "nearest"])
@pytest.mark.parametrize("mode", CHANNELS)
def test_a_scaled_png_is_what_pillow_makes_of_it(interpolation, mode):
    image = photograph((61, 47), mode.upper())
    pixels = decoded(
        [encoded(image, "PNG")], Decode(size=(20, 30), crop="none", mode=mode, interpolation=interpolation)
    )
    wanted = image.resize((30, 20), PIL.Image.Resampling[interpolation.upper()])
    assert np.array_equal(pixels[0], with_axis(wanted))


def test_the_nearest_pixel_of_a_jpeg_is_one_of_its_own():
    image = photograph((640, 640))
    payload = encoded(image)
    pixels = decoded([payload], Decode(size=64, interpolation="nearest"))[0]
    assert np.array_equal(pixels, np.asarray(opened(payload).resize((64, 64), PIL.Image.Resampling.NEAREST)))


def test_an_image_is_scaled_up_too():
    assert decoded([encoded(photograph((10, 8)))], Decode(size=64)).shape == (1, 64, 64, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_cut_without_scaling_copies_pixels(kind):
    payload = encoded(photograph((60, 40)), kind)
    whole = decoded([payload])[0]
    assert np.array_equal(decoded([payload], Decode(size=40))[0], whole[:, 10:50])
    lefts = set()
    for seed in range(60):
        part = decoded([payload], Decode(size=40, crop="random"), seeds=[seed])[0]
        lefts |= {left for left in range(21) if np.array_equal(part, whole[:, left : left + 40])}
    assert len(lefts) > 15


def test_one_seed_cuts_all_images_of_a_sample_at_one_place():
    image = np.zeros((40, 200, 3), np.uint8)
    image[:, :, 0] = np.arange(200)
    photo, mask = encoded(PIL.Image.fromarray(image), "PNG"), encoded(PIL.Image.fromarray(image[:, :, 0]), "PNG")
    for seed in range(5):
        colours = decoded([photo], Decode(size=40, crop="random"), seeds=[seed])[0]
        greys = decoded([mask], Decode(size=40, crop="random", mode="l", interpolation="nearest"), seeds=[seed])[0]
        assert np.array_equal(colours[:, :, :1], greys)


def test_the_shape_of_a_bucket_wins_over_the_size():
    payloads = [encoded(photograph((60, 40))), encoded(photograph((40, 60)))]
    assert decoded(payloads, Decode(size=10), shape=(32, 48)).shape == (2, 32, 48, 3)


# --- places ----------------------------------------------------------------------------------------------------------


def test_a_substitute_of_the_same_shape_stays_in_the_array():
    good, other = encoded(photograph()), encoded(photograph(number=2), "PNG")
    batch = batch_of([good, b"damaged", good])
    batch.decode(0, good, 0)
    batch.decode(2, good, 0)
    with pytest.raises(PIL.UnidentifiedImageError):
        batch.decode(1, b"damaged", 0)
    batch.decode(1, other, 0)
    array = batch.finish()
    assert isinstance(array, np.ndarray)
    assert np.array_equal(array[1], np.asarray(opened(other)))


def test_a_substitute_of_another_shape_makes_the_batch_a_list():
    good, other = encoded(photograph()), encoded(photograph((20, 30)))
    batch = batch_of([good, good])
    batch.decode(0, good, 0)
    batch.decode(1, good, 0)
    batch.decode(1, other, 0)
    assert batch.value(1).shape == (30, 20, 3)
    images = batch.finish()
    assert [image.shape for image in images] == [(47, 61, 3), (30, 20, 3)]
    assert np.array_equal(images[0], np.asarray(opened(good)))


def test_a_marker_makes_the_batch_a_list_and_an_array_that_fits_does_not():
    good = encoded(photograph())
    batch = batch_of([good, good])
    batch.decode(0, good, 0)
    batch.put(1, None)
    assert batch.value(1) is None
    assert batch.finish()[1] is None
    batch = batch_of([good, good])
    batch.decode(0, good, 0)
    batch.put(1, np.full((47, 61, 3), 9, np.uint8))
    array = batch.finish()
    assert array.shape == (2, 47, 61, 3)
    assert (array[1] == 9).all()


def test_threads_fill_a_batch_as_one_does():
    payloads = [
        encoded(photograph((300, 200), number=number % 5), progressive=bool(number % 2)) for number in range(24)
    ]
    payloads[5] = encoded(
        photograph((200, 300)), exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0"
    )
    for options in (Decode(), Decode(size=64, crop="random"), Decode(size=64, mode="l")):
        wanted = decoded(payloads, options)
        slabs = Slabs()
        for _ in range(3):
            batch = ImageBatch(options, payloads, None, slabs)

            def work(first, batch=batch):
                for place in range(first, 24, 4):
                    batch.decode(place, payloads[place], place)

            threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert all(map(np.array_equal, batch.finish(), wanted))


# --- hostile bytes ---------------------------------------------------------------------------------------------------


def with_frame(payload, width, height):
    """Return a JPEG whose frame header says another size."""
    at = payload.index(b"\xff\xc0")
    return payload[: at + 5] + struct.pack(">HH", height, width) + payload[at + 9 :]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "PPM"])
def test_more_pixels_than_allowed_are_refused_before_they_are_decoded(kind, monkeypatch):
    payload = encoded(photograph((60, 50)), kind)
    assert decoded([payload], Decode(max_pixels=3000)).shape == (1, 50, 60, 3)
    monkeypatch.setattr(PIL.Image.Image, "load", lambda _: pytest.fail("it was decoded"))
    monkeypatch.setattr("simplejpeg.decode_jpeg", lambda *_, **__: pytest.fail("it was decoded"))
    with pytest.raises(DecodeError, match="60 x 50 = 3000 pixels, and the limit is 2999"):
        decoded([payload], Decode(max_pixels=2999))


def test_a_bomb_takes_no_memory_and_spoils_only_its_own_place():
    good = encoded(photograph())
    bomb = with_frame(good, 65_000, 65_000)
    batch = batch_of([bomb, good])
    with pytest.raises(DecodeError, match=r"max_pixels"):
        batch.decode(0, bomb, 0)
    batch.decode(0, good, 0)
    batch.decode(1, good, 0)
    assert batch.finish().shape == (2, 47, 61, 3)


@given(st.data())
def test_no_header_makes_a_jpeg_write_beyond_its_place(data):
    good = encoded(photograph((32, 24)))
    payload = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    batch = batch_of([good, bytes(payload), good])
    batch.decode(0, good, 0)
    batch.decode(2, good, 0)
    before = [np.array(batch.value(place)) for place in (0, 2)]
    try:
        batch.decode(1, bytes(payload), 0)
    except Exception:  # noqa: BLE001 - Pillow raises all sorts of errors
        batch.put(1, None)
    assert np.array_equal(batch.value(0), before[0])
    assert np.array_equal(batch.value(2), before[1])


@pytest.mark.parametrize("size", [(31, 24), (24, 32), (16, 48), (33, 24)])
def test_an_image_that_decodes_to_another_size_than_its_header_says_is_an_error(size):
    payload = encoded(photograph((32, 24)))
    lie = parse_geometry(with_frame(payload, *size))
    for options in (Decode(), Decode(size=8)):
        with pytest.raises(DecodeError, match=rf"says {size[0]} x {size[1]} pixels, and it decodes to 32 x 24"):
            decode_shaped(payload, lie, options, Target(options.shape, 0), Slabs())
    png = encoded(photograph((32, 24)), "PNG")
    lie = parse_geometry(encoded(photograph(size), "PNG"))
    with pytest.raises(DecodeError, match="header of the png"):
        decode_shaped(png, lie, Decode(), Target(None, 0), Slabs())


def test_a_cut_off_image_is_an_error_wherever_it_is_cut():
    payload = encoded(photograph())
    for end in (0, 1, 3, 20, len(payload) // 2, len(payload) - 50):
        batch = batch_of([payload[:end]])
        with pytest.raises((OSError, ValueError, SyntaxError)):
            batch.decode(0, payload[:end], 0)


@pytest.mark.parametrize("value", [None, 3, [], [b"a", b"b"], np.arange(3)])
def test_a_value_that_is_no_payload_is_an_error(value):
    batch = batch_of([value])
    with pytest.raises(DecodeError, match="where one payload is expected"):
        batch.decode(0, value, 0)


def filled(batch, payloads):
    for place, payload in enumerate(payloads):
        batch.decode(place, payload, 0)
    return batch.finish()


def test_what_the_batch_before_was_decides_nothing_but_where_images_are_decoded_to():
    chance = random.Random(5)
    small, wide, png = (
        encoded(photograph(size), kind) for size, kind in (((24, 16), "JPEG"), ((40, 16), "JPEG"), ((24, 16), "PNG"))
    )
    kinds = [[small] * 9, [wide] * 9, [small] * 8 + [wide], [png] * 9, [small, png] * 6, [wide], [small] * 3, []]
    for options in (Decode(), Decode(mode="l"), Decode(size=20)):
        decoder = BatchDecoder(options)
        for payloads in chance.choices(kinds, k=60):
            known, alone = (filled(each.begin("jpg", payloads), payloads) for each in (decoder, BatchDecoder(options)))
            assert type(known) is type(alone)
            assert len(known) == len(alone)
            assert all(map(np.array_equal, known, alone))


def test_images_in_the_shape_of_the_batch_before_are_decoded_straight_into_one_array(monkeypatch):
    decoder, payloads = BatchDecoder(Decode()), [encoded(photograph((24, 16)))] * 9
    read = []
    monkeypatch.setattr(module, "parse_geometry", lambda payload: read.append(payload) or parse_geometry(payload))
    filled(decoder.begin("jpg", payloads), payloads)
    assert len(read) == 9
    batch = decoder.begin("jpg", payloads)
    assert len(read) == 9  # they are read by who decodes the images
    array = filled(batch, payloads)
    assert len(read) == 9  # these begin like those
    other = encoded(photograph((24, 16), number=1), quality=50)
    filled(decoder.begin("jpg", payloads), [*payloads[:7], other, other])
    assert read[9:] == [other]
    assert all(np.shares_memory(array, batch.value(place)) for place in range(9))


def test_images_that_begin_like_the_one_before_come_out_as_they_do_alone():
    chance = random.Random(11)
    picture, other = photograph((24, 24)), photograph((24, 24), number=1)
    whole = encoded(picture, quality=85)
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    payloads = [
        *(whole, encoded(other, quality=85), encoded(other, quality=50), encoded(other.convert("L"))),
        *(
            encoded(other.convert("CMYK")),
            encoded(other, exif=exif),
            encoded(other, "PNG"),
            encoded(photograph((16, 24))),
        ),
        *(whole[:-200], whole[: len(whole) // 2], whole[:200], whole[:3], b""),
    ]

    def alone(payload, options):
        try:
            return decoded([payload], options)[0]
        except Exception as error:  # noqa: BLE001 - whatever it is, the batch is to raise the same
            return type(error)

    for options in (Decode(), Decode(mode="l"), Decode(mode="rgba"), Decode(orient=False), Decode(size=24)):
        wanted = {payload: alone(payload, options) for payload in payloads}
        decoder = BatchDecoder(options)
        for _ in range(40):
            drawn = chance.choices(payloads, [8, 8, *[1] * (len(payloads) - 2)], k=12)
            batch = decoder.begin("jpg", drawn)
            for place, payload in enumerate(drawn):
                want = wanted[payload]
                if isinstance(want, type):
                    with pytest.raises(want):
                        batch.decode(place, memoryview(payload), 0)
                else:
                    batch.decode(place, memoryview(payload), 0)
                    assert np.array_equal(batch.value(place), want)
