"""Images: pixel for pixel what Pillow gives, in every form; limits; what is left to a program, and so refused."""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import simplejpeg

from shardset.decoding.images import (
    IMAGE_SPECS,
    IMAGE_SUFFIXES,
    decode_image,
    find_spec,
    image_decoder,
    image_decoders,
    is_readable,
)
from shardset.decoding.registry import USUAL
from shardset.errors import DecodeError, MissingExtraError

PHOTOGRAPHS = sorted(
    path
    for path in (Path(__file__).parents[2] / "examples" / "data").iterdir()
    if path.suffix in {".jpg", ".png", ".webp"}
)
NUMPY = [word for word, spec in IMAGE_SPECS.items() if spec.container == "numpy"]
PILLOW = [word for word, spec in IMAGE_SPECS.items() if spec.container == "pil"]
JPEGS = {
    "usual": {},
    "progressive": {"progressive": True},
    "no subsampling": {"subsampling": 0},
    "subsampled across": {"subsampling": 1},
    "subsampled both ways": {"subsampling": 2, "quality": 30},
    "fine": {"quality": 98, "optimize": True},
    "restart markers": {"restart_marker_rows": 1},
}


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def photograph(size=(61, 47), mode="RGB"):
    with PIL.Image.open(PHOTOGRAPHS[0]) as image:
        return image.convert("RGB").resize(size).convert(mode)


def opened(payload, mode):
    return PIL.Image.open(io.BytesIO(payload)).convert(mode)


def assert_as_pillow_has_it(payload, words=(*NUMPY, *PILLOW)):
    for word in words:
        spec = find_spec(word)
        expected = opened(payload, spec.mode.upper())
        found = decode_image(payload, spec)
        if spec.container == "pil":
            assert type(found) is PIL.Image.Image
            assert (found.mode, found.size, found.info) == (expected.mode, expected.size, expected.info)
            assert found.tobytes() == expected.tobytes()
            continue
        pixels = np.asarray(expected)
        if spec.depth == "float":
            pixels = pixels.astype(np.float32) / 255.0
        np.testing.assert_array_equal(found, pixels, strict=True)
        assert found.flags.c_contiguous
        assert found.flags.writeable


@pytest.fixture
def taken(monkeypatch):
    """The sizes of images that simplejpeg decodes."""
    sizes = []
    decode = simplejpeg.decode_jpeg

    def watched(*args, **kwargs):
        pixels = decode(*args, **kwargs)
        sizes.append(pixels.shape)
        return pixels

    monkeypatch.setattr(simplejpeg, "decode_jpeg", watched)
    return sizes


@pytest.mark.parametrize("path", PHOTOGRAPHS, ids=lambda path: path.name)
def test_photographs_have_pillows_pixels(path):
    assert_as_pillow_has_it(path.read_bytes(), ["rgb8", "l8", "rgba8", "pil"])


@pytest.mark.parametrize("options", JPEGS.values(), ids=JPEGS)
@pytest.mark.parametrize("size", [(1, 1), (7, 5), (16, 16), (33, 18), (254, 257)])
def test_jpegs_of_all_kinds_have_pillows_pixels(size, options, taken):
    assert_as_pillow_has_it(encoded(photograph(size), "JPEG", **options))
    assert len(taken) == 4  # rgb8, rgba8, rgb, rgba


@pytest.mark.parametrize(("mode", "times"), [("L", 6), ("CMYK", 0), ("1", 6)])
def test_jpegs_of_other_colours_have_pillows_pixels(mode, times, taken):
    assert_as_pillow_has_it(encoded(photograph(mode=mode), "JPEG"))
    assert len(taken) == times


def test_a_jpeg_that_stores_rgb_has_pillows_pixels(taken):
    assert_as_pillow_has_it(encoded(photograph(), "JPEG", keep_rgb=True))
    assert len(taken) == 4


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "TGA", "ICO", "JPEG2000", "AVIF"])
def test_other_formats_have_pillows_pixels(kind):
    assert_as_pillow_has_it(encoded(photograph(), kind))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16"])
def test_other_modes_have_pillows_pixels(mode):
    image = photograph(mode="L" if mode == "I;16" else mode)
    assert_as_pillow_has_it(encoded(image.convert("I;16") if mode == "I;16" else image, "PNG"))


def test_metadata_stays_on_a_pillow_image_and_turns_nothing():
    exif = PIL.Image.Exif()
    exif[274] = 6
    image = image_decoder("pil")(encoded(photograph(), "JPEG", exif=exif, dpi=(72, 72)))
    assert image.size == (61, 47)
    assert image.getexif()[274] == 6
    assert image.info["dpi"] == (72, 72)


def test_the_shapes_and_ranges_are_as_said():
    payload = encoded(photograph(), "PNG")
    assert {word: image_decoder(word)(payload).shape for word in NUMPY} == {
        "l8": (47, 61),
        "rgb8": (47, 61, 3),
        "rgba8": (47, 61, 4),
        "l": (47, 61),
        "rgb": (47, 61, 3),
        "rgba": (47, 61, 4),
    }
    values = image_decoder("rgba")(payload)
    assert values.dtype == np.float32
    assert 0 <= values.min() < values.max() == 1


@pytest.mark.parametrize("word", ["jpeg", "", "rgb16"])
def test_a_word_that_is_no_spec_is_refused(word):
    with pytest.raises(ValueError, match="unknown image spec"):
        image_decoder(word)


def test_a_word_in_capitals_is_refused_with_the_right_one():
    with pytest.raises(ValueError, match="did you mean 'pil'"):
        find_spec("PIL")


@pytest.mark.parametrize("word", ["rgb8", "pil"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_an_image_above_pillows_limit_is_an_error_and_no_warning(word, kind, monkeypatch):
    payload = encoded(photograph((40, 30)), kind)
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 1200)
    assert image_decoder(word)(payload) is not None
    for limit in (1199, 500):  # where Pillow warns, and where it raises an error of its own
        monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(DecodeError, match=r"1200 pixels.*set PIL\.Image\.MAX_IMAGE_PIXELS"):
            image_decoder(word)(payload)
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", None)
    assert image_decoder(word)(payload) is not None


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_above_pillows_limit_is_an_error_where_warnings_are_silenced(monkeypatch):
    payload = encoded(photograph((40, 30)), "PNG")
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 1199)
    with pytest.raises(DecodeError, match="1200 pixels"):
        image_decoder("pil")(payload)


@pytest.mark.parametrize("word", ["rgb8", "pil"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_truncated_image_is_an_error(word, kind):
    payload = encoded(photograph(), kind)
    for cut in (0, 3, 40, len(payload) // 2):
        with pytest.raises((OSError, ValueError, SyntaxError)):
            image_decoder(word)(payload[:cut])


def test_a_jpeg_that_simplejpeg_will_not_take_is_left_to_pillow(taken):
    payload = encoded(photograph(), "JPEG")
    odd = payload[:2] + b"\xff\xfe\x00\x04hi" + b"junk" + payload[2:]  # bytes between two markers
    with pytest.raises(ValueError, match=r"(?i)extraneous"):
        simplejpeg.decode_jpeg(odd)
    taken.clear()
    try:
        expected = np.asarray(opened(odd, "RGB"))
    except OSError:
        with pytest.raises(OSError, match="identify"):
            image_decoder("rgb8")(odd)
    else:
        np.testing.assert_array_equal(image_decoder("rgb8")(odd), expected)
    assert not taken


@pytest.mark.parametrize("word", ["rgb8", "pil"])
def test_postscript_is_refused_because_it_is_a_program(word):
    buffer = io.BytesIO()
    photograph(mode="L").save(buffer, "EPS")
    with pytest.raises(DecodeError, match=r"PostScript.*wds.handle_extension"):
        image_decoder(word)(buffer.getvalue())


def test_without_simplejpeg_the_pixels_are_the_same(monkeypatch):
    payload = encoded(photograph(), "JPEG")
    expected = image_decoder("rgb8")(payload)
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    np.testing.assert_array_equal(image_decoder("rgb8")(payload), expected)


@pytest.mark.parametrize("word", ["rgb8", "pil"])
def test_without_pillow_the_extra_is_named(word, monkeypatch):
    payload = encoded(photograph(), "JPEG")
    monkeypatch.delattr(sys.modules["PIL"], "Image")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match=r"shardset\[images\]"):
        image_decoder(word)(payload)


def test_without_torch_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"shardset\[torch\]"):
        image_decoder("torchrgb")(encoded(photograph(), "JPEG"))


def test_suffixes_that_pillow_knows_and_cannot_read_are_no_images():
    assert not {"h5", "hdf", "mpg", "mpeg", "grib", "bufr"} & set(IMAGE_SUFFIXES)
    assert {"jpg", "png", "webp", "rgb", "avif"} <= set(IMAGE_SUFFIXES)
    assert len(set(IMAGE_SUFFIXES)) == len(IMAGE_SUFFIXES)


@pytest.mark.parametrize(("suffix", "kind"), [("heic", "HEIF"), ("jxl", "JXL"), ("avif", "AVIF")])
def test_formats_of_plugins_are_read_where_the_plugin_is(suffix, kind):
    assert is_readable(suffix)
    assert_as_pillow_has_it(encoded(photograph(), kind), ["rgb8", "pil"])


def test_formats_of_plugins_are_no_images_where_the_plugin_is_missing(monkeypatch):
    for suffix, module in (("heic", "pillow_heif"), ("jxl", "pillow_jxl")):
        monkeypatch.setitem(sys.modules, module, None)
        kind = PIL.Image.EXTENSION.pop(f".{suffix}", None)
        try:
            assert not is_readable(suffix)
            assert suffix not in image_decoders("rgb8")
        finally:
            if kind is not None:
                PIL.Image.EXTENSION[f".{suffix}"] = kind
    assert is_readable("jpg")


def test_a_registry_takes_decoders_of_images():
    registry = USUAL.extended(image_decoders("l8", ["jpg", "seg.png", "png"]))
    assert registry.decode("jpg", encoded(photograph(), "JPEG")).shape == (47, 61)
    assert registry.decode("left.png", encoded(photograph(), "PNG")).shape == (47, 61)
    assert registry.decode("webp", b"bytes") == b"bytes"


def test_a_decoder_of_images_pickles():
    payload = encoded(photograph(), "JPEG")
    decode = pickle.loads(pickle.dumps(image_decoder("rgb8")))
    np.testing.assert_array_equal(decode(payload), image_decoder("rgb8")(payload))


def test_a_format_that_another_thread_makes_pillow_load_just_now_is_tried_again(monkeypatch):
    # Between its two tries, Pillow notes which formats it has tried; what another thread has loaded by then counts too.
    payload = encoded(photograph(), "WEBP")
    expected = image_decoder("rgb8")(payload)
    calls = []
    open_image = PIL.Image.open

    def open_late(file):
        calls.append(file)
        if len(calls) == 1:
            raise PIL.UnidentifiedImageError("cannot identify image file")
        return open_image(file)

    monkeypatch.setattr(PIL.Image, "open", open_late)
    np.testing.assert_array_equal(image_decoder("rgb8")(payload), expected)
    assert len(calls) == 2
