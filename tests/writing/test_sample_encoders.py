from __future__ import annotations

import gzip
import io
import json
import pickle
import sys
import zipfile
from collections import namedtuple
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shardset.errors import EncodeError, MissingExtraError
from shardset.formats.tenbin import decode_tenbin
from shardset.writing.image_encoders import IMAGE_SUFFIXES, encode_image
from shardset.writing.sample_encoders import ENCODERS, encode_sample, encode_value, make_encoder

encode = partial(encode_value, encoders=ENCODERS)

PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3) * 4
EXACT = ["png", "webp", "tif", "tiff", "bmp", "jp2"]


def opened(payload):
    from PIL import Image

    image = Image.open(io.BytesIO(payload))
    image.load()
    return image


# ---- numbers, text, JSON


@pytest.mark.parametrize("field", ["cls", "cls2", "class", "count", "index", "inx", "id", "a.cls"])
@pytest.mark.parametrize("value", [3, True, np.int64(3), np.uint8(3), np.array(3)], ids=repr)
def test_whole_numbers_are_decimal_digits(field, value):
    assert encode(value, field) == str(int(value)).encode()


@pytest.mark.parametrize("value", [1.0, None, [1], "1.0", "cat", "", np.float32(1)], ids=repr)
def test_what_is_no_whole_number_is_refused_where_readers_make_one(value):
    with pytest.raises(EncodeError, match="the value of 'cls'"):
        encode(value, "cls")


def test_text_of_a_number_is_taken_where_a_number_belongs():
    assert encode("3", "cls") == b"3"
    with pytest.raises(EncodeError, match="the value of 'class', a str, has no encoding as class"):
        encode("cat", "class")


@pytest.mark.parametrize("field", ["txt", "text", "transcript", "html", "htm", "csv", "caption", "x.unheard"])
def test_text_is_utf8_in_any_field_that_holds_text_or_is_not_known(field):
    assert encode("größe\n", field) == "größe\n".encode()


def test_what_is_no_text_is_refused_where_text_belongs():
    with pytest.raises(EncodeError, match="the value of 'txt', a int, has no encoding as txt"):
        encode(3, "txt")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(JSON.filter(lambda value: not isinstance(value, str)))
def test_json_is_decoded_to_what_it_was(value):
    assert json.loads(encode(value, "json")) == value


def test_text_in_a_json_field_is_json_already_or_refused():
    assert encode('{"a": 1}', "json") == b'{"a": 1}'
    assert encode('{"ä": 1}', "jsn") == '{"ä": 1}'.encode()
    for text in ("already", "", "NaN", '{"a": Infinity}'):
        with pytest.raises(EncodeError, match="text is taken for JSON, and this is none"):
            encode(text, "json")


def test_json_is_utf8_and_lone_surrogates_are_spelled_out():
    assert encode({"ä": "日"}, "json") == '{"ä": "日"}'.encode()
    assert json.loads(encode(["\ud800"], "json")) == ["\ud800"]


def test_scalars_of_numpy_are_json_and_other_objects_are_not():
    value = {"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True)}  # noqa: FBT003
    assert json.loads(encode(value, "json")) == {"a": 0.5, "b": 3, "c": True}
    for bad in (np.zeros(2), {1, 2}, float("nan"), {"x": [float("inf")]}, np.float64("nan"), object()):
        with pytest.raises(EncodeError, match="'json'"):
            encode({"x": bad}, "json")


# ---- arrays


ARRAYS = hnp.arrays(
    st.sampled_from(["u1", "i4", ">f8", "f2", "?", "U3", "M8[s]"]), hnp.array_shapes(min_dims=0, min_side=0, max_side=4)
)


@given(ARRAYS)
def test_an_array_is_read_back_from_npy_without_pickles(array):
    back = np.load(io.BytesIO(encode(array, "npy")), allow_pickle=False)
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype


@given(st.dictionaries(st.sampled_from(["a", "file", "x/y", "é"]), ARRAYS))
def test_arrays_are_read_back_from_npz_and_are_the_same_bytes_each_time(arrays):
    payload = encode(arrays, "npz")
    assert payload == encode(arrays, "npz")
    with np.load(io.BytesIO(payload), allow_pickle=False) as back:
        assert set(back.files) == set(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(back[name], array)


def test_npz_is_compressed():
    with zipfile.ZipFile(io.BytesIO(encode({"a": np.zeros(10_000)}, "npz"))) as archive:
        assert archive.infolist()[0].compress_size < 1000


@pytest.mark.parametrize("field", ["npy", "npz", "ten", "seg.npy"])
@pytest.mark.parametrize(
    "array", [np.array([object()]), np.zeros(1, [("a", "O")]), np.array([None, "x"])], ids=["object", "field", "none"]
)
def test_arrays_of_objects_are_refused_because_reading_them_would_run_code(field, array):
    value = {"a": array} if field == "npz" else array
    with pytest.raises(EncodeError, match="arrays of objects are pickles inside"):
        encode(value, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [("npy", [1, 2]), ("npy", "text"), ("npz", np.zeros(2)), ("npz", {"a": [1]}), ("npz", {1: np.zeros(2)})],
)
def test_what_is_no_array_is_refused_where_one_belongs(field, value):
    with pytest.raises(EncodeError, match=f"the value of '{field}'"):
        encode(value, field)


@pytest.mark.parametrize("field", ["ten", "tenbin", "tb"])
def test_one_array_or_several_are_tenbin(field):
    for value in (np.ones((2, 3), np.float32), [np.ones(1), np.arange(3, dtype=np.uint32)]):
        back = decode_tenbin(encode(value, field))
        arrays = value if isinstance(value, list) else [value]
        assert len(back) == len(arrays)
        for ours, theirs in zip(back, arrays, strict=True):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.dtype == theirs.dtype


# ---- images


@pytest.mark.parametrize("suffix", [*EXACT, "ppm", "pnm"])
@pytest.mark.parametrize("channels", [None, 1, 3])
def test_an_image_is_read_back_pixel_by_pixel(suffix, channels):
    pixels = PIXELS if channels == 3 else PIXELS[:, :, 0] if channels is None else PIXELS[:, :, :1]
    image = opened(encode(pixels, suffix))
    mode = "RGB" if channels == 3 or suffix == "ppm" else "L"
    np.testing.assert_array_equal(
        np.asarray(image.convert(mode)), np.asarray(opened(encode_image(pixels)).convert(mode))
    )
    np.testing.assert_array_equal(
        np.asarray(opened(encode_image(pixels))), pixels[:, :, 0] if channels == 1 else pixels
    )


@pytest.mark.parametrize("suffix", ["png", "webp", "tiff"])
def test_an_image_with_alpha_is_read_back_pixel_by_pixel(suffix):
    pixels = np.dstack([PIXELS, PIXELS[:, :, :1]])
    np.testing.assert_array_equal(np.asarray(opened(encode(pixels, suffix)).convert("RGBA")), pixels)


@pytest.mark.parametrize("suffix", ["jpg", "jpeg", "jpe", "jfif", "img", "image"])
def test_jpeg_is_of_quality_100(suffix):
    flat = np.full((16, 16, 3), 90, np.uint8)
    payload = encode(flat, suffix)
    assert opened(payload).format == "JPEG"
    assert np.abs(np.asarray(opened(payload)).astype(int) - 90).max() <= 1
    assert max(opened(payload).quantization[0]) == 1


def test_netpbm_is_of_the_kind_that_its_suffix_says():
    bits = np.eye(5, dtype=bool)
    assert encode(bits, "pbm")[:2] == b"P4"
    assert encode(PIXELS[:, :, 0], "pgm")[:2] == b"P5"
    assert encode(bits, "pgm")[:2] == b"P5"
    assert encode(PIXELS[:, :, 0], "ppm")[:2] == encode(PIXELS, "ppm")[:2] == b"P6"
    np.testing.assert_array_equal(np.asarray(opened(encode(bits, "pbm"))), bits)
    for suffix in ("pbm", "pgm"):
        with pytest.raises(EncodeError, match=f"is no {suffix}; convert it first"):
            encode(PIXELS, suffix)


def test_pictures_of_pillow_are_taken_and_those_that_a_format_cannot_hold_refused():
    from PIL import Image

    picture = Image.fromarray(PIXELS)
    assert encode(picture, "png") == encode(PIXELS, "png")
    with pytest.raises(EncodeError, match=r"an image of mode RGBA as jpg: .*; convert it first"):
        encode(picture.convert("RGBA"), "jpg")


@given(hnp.arrays(np.uint8, (3, 4, 3)))
def test_floats_from_0_to_1_give_the_bytes_that_they_were_made_of(pixels):
    for kind in (np.float32, np.float64):
        np.testing.assert_array_equal(np.asarray(opened(encode(pixels.astype(kind) / 255, "png"))), pixels)


@pytest.mark.parametrize("value", [1.01, -0.01, 255.0, np.nan, np.inf])
def test_floats_outside_0_to_1_are_refused(value):
    image = np.zeros((3, 3))
    image[1, 1] = value
    with pytest.raises(EncodeError, match="float images have values from 0 to 1"):
        encode(image, "png")


def test_floats_a_little_outside_are_clipped():
    np.testing.assert_array_equal(np.asarray(opened(encode(np.array([[-0.0005, 1.0005]]), "png"))), [[0, 255]])


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((3, 4, 5), np.uint8), r"shape \(3, 4, 5\) is no image; channels come last"),
        (np.zeros((4, 5, 2), np.uint8), r"shape \(4, 5, 2\) is no image"),
        (np.zeros(4, np.uint8), "is no image"),
        (np.zeros((0, 4), np.uint8), "is no image"),
        (np.zeros((2, 2), np.int64), "no encoding for an image of int64"),
        (np.zeros((2, 2, 3), np.uint16), "no encoding for an image of uint16"),
        ([[1, 2]], "not a list"),
        ("picture", "not a str"),
    ],
)
def test_what_is_no_image_is_refused(image, message):
    with pytest.raises(EncodeError, match=message):
        encode(image, "png")


def test_grey_images_of_16_bits_keep_them():
    pixels = np.array([[0, 1, 65535]], np.uint16)
    for suffix in ("png", "tiff"):
        np.testing.assert_array_equal(np.asarray(opened(encode(pixels, suffix))), pixels)


def test_an_unknown_format_of_images_is_refused():
    with pytest.raises(ValueError, match="images are not written as 'gif'; there are jpg, "):
        encode_image(PIXELS, "gif")
    assert encode_image(PIXELS, "JPG")[:2] == b"\xff\xd8"


# ---- other fields


@pytest.mark.parametrize("field", ["pyd", "pickle", "pkl"])
def test_any_value_is_a_pickle_where_one_belongs(field):
    assert pickle.loads(encode({"x": {1, 2}}, field)) == {"x": {1, 2}}
    assert pickle.loads(encode("text", field)) == "text"


@pytest.mark.parametrize(
    ("field", "module"),
    [("mp", "msgpack"), ("msgpack", "msgpack"), ("msg", "msgpack"), ("cbor", "cbor2"), ("pth", "torch")],
)
def test_a_missing_package_is_named(monkeypatch, field, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=f"{module} is not installed - pip install"):
        encode({"a": 1}, field)


def test_images_need_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"shardset\[images\]"):
        encode(PIXELS, "png")


def test_gz_compresses_the_same_bytes_each_time():
    assert gzip.decompress(encode([1, 2], "json.gz")) == b"[1, 2]"
    assert gzip.decompress(encode("x" * 1000, "txt.gz")) == b"x" * 1000
    assert gzip.decompress(encode(b"raw", "bin.gz")) == b"raw"
    assert encode("x", "txt.gz") == encode("x", "txt.gz")


def test_bytes_that_are_a_gzip_file_are_not_compressed_again():
    packed = gzip.compress(b"raw")
    assert encode(packed, "bin.gz") is packed
    assert encode(b"raw", "gz") == b"raw"  # nothing stands before the suffix


@pytest.mark.parametrize("suffix", sorted(ENCODERS))
def test_bytes_are_a_payload_already_in_every_field(suffix):
    for value in (b"\0raw", bytearray(b"\0raw"), memoryview(b"\0raw")):
        assert encode(value, suffix) is value


@pytest.mark.parametrize("value", [3, None, {"a": 1}, np.zeros(2)], ids=lambda value: type(value).__name__)
def test_a_value_without_an_encoder_is_refused_with_field_and_type_and_what_to_do(value):
    message = rf"no encoder for a {type(value).__name__} in the field 'x\.safetensors' - give bytes, or an encoder"
    with pytest.raises(EncodeError, match=message) as caught:
        encode(value, "x.safetensors", key="k")
    assert (caught.value.key, caught.value.field) == ("k", "x.safetensors")
    assert isinstance(caught.value, ValueError)


def test_suffixes_count_in_any_case_and_only_the_last_part_counts():
    assert encode(3, "png.CLS") == b"3"


def test_a_sample_keeps_what_is_no_field():
    sample = {"__key__": "a", "__index__": 3, 7: "seven", "cls": 1, "raw": b"x"}
    assert encode_sample(sample, ENCODERS) == {"__key__": "a", "__index__": 3, 7: "seven", "cls": b"1", "raw": b"x"}


@pytest.mark.parametrize("spec", [False, None])
def test_nothing_is_encoded_where_nothing_is_asked_for(spec):
    assert make_encoder(spec) is None


def test_an_error_of_an_encoder_is_told_with_the_field():
    Point = namedtuple("Point", "x y")  # noqa: PYI024

    def fail(value):
        raise RuntimeError(value.x)

    with pytest.raises(EncodeError, match="the value of 'p', a Point, has no encoding as p: 7") as caught:
        encode_value(Point(7, 8), "p", {"p": fail})
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_encoder_that_is_added_is_used():
    ENCODERS["upper"] = lambda value: str(value).upper().encode()
    try:
        assert make_encoder(spec=True)({"upper": 1.5})["upper"] == b"1.5"
    finally:
        del ENCODERS["upper"]


def test_every_suffix_in_the_table_of_the_module_has_an_encoder():
    from shardset.writing import sample_encoders

    rows = sample_encoders.__doc__.split("::\n\n")[1].split("\n\n")[0].splitlines()
    named = {word for row in rows for word in row[4:48].split()} - {"ANY.gz"}
    assert named == set(ENCODERS)
    assert set(IMAGE_SUFFIXES) <= named
