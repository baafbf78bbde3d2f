"""The names of webdataset.autodecode and webdataset.tenbin, with their meanings, flags and errors."""

from __future__ import annotations

import gzip
import io
import pickle
import sys

import numpy as np
import PIL.Image
import pytest

import shardset.webdataset
from shardset.errors import DecodeError, FormatError, MissingExtraError, TruncatedError
from shardset.formats.tenbin import encode_tenbin
from shardset.webdataset import autodecode, tenbin


def png():
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (5, 4), (10, 20, 30)).save(buffer, "PNG")
    return buffer.getvalue()


class FakeTorch:
    """Stands where torch is imported, and keeps what it is asked for."""

    def __init__(self):
        self.asked = []

    def load(self, stream, **options):
        self.asked.append(options)
        return stream.read()


@pytest.fixture
def secured(monkeypatch):
    from shardset.webdataset import utils

    monkeypatch.setattr(utils, "enforce_security", True)


# --- autodecode ---


def test_every_public_name_is_there():
    for name in autodecode.__all__:
        assert getattr(autodecode, name) is not None


def test_the_words_for_images_are_webdatasets():
    assert list(autodecode.imagespecs) == [
        *(
            "l8",
            "rgb8",
            "rgba8",
            "l",
            "rgb",
            "rgba",
            "torchl8",
            "torchrgb8",
            "torchrgba8",
            "torchl",
            "torchrgb",
            "torch",
        ),
        *("torchrgba", "pill", "pil", "pilrgb", "pilrgba"),
    ]
    kind, depth, mode = autodecode.imagespecs["rgb8"]
    assert (kind, depth, mode) == ("numpy", "uint8", "rgb")


def test_an_image_handler_takes_images_and_knows_what_it_was_made_of():
    for make in (autodecode.ImageHandler, autodecode.imagehandler):
        handler = pickle.loads(pickle.dumps(make("rgb8")))
        assert handler(".png", png()).shape == (4, 5, 3)
        assert handler(".txt", b"text") is None
        assert handler.imagespec == "rgb8"
        assert "jpg" in handler.extensions
    assert autodecode.ImageHandler("l8", ["xyz"])(".xyz", png()).shape == (4, 5)
    with pytest.raises(ValueError, match="image spec"):
        autodecode.ImageHandler("nonsense")


def test_a_decoder_takes_lists_of_handlers_as_webdatasets_does():
    decoder = autodecode.Decoder([autodecode.imagehandler("l8")], only="png json", partial=True)
    found = decoder.decode({"__key__": "a", "png": png(), "json": b"[1]", "cls": b"1"})
    assert found.pop("png").shape == (4, 5)
    assert found == {"__key__": "a", "json": [1], "cls": b"1"}
    assert decoder.decode1("json.gz", gzip.compress(b"[1]")) == [1]
    assert autodecode.default_decoder({"cls": b"1", "json.gz": gzip.compress(b"2")}) == {"cls": 1, "json.gz": 2}


def test_a_decoding_error_is_the_error_of_this_package():
    assert autodecode.DecodingError is DecodeError
    with pytest.raises(autodecode.DecodingError) as caught:
        autodecode.Decoder([])({"__key__": "a", "__url__": "u.tar", "cls": b"x"})
    assert (caught.value.url, caught.value.key, caught.value.k) == ("u.tar", "a", "cls")
    assert caught.value.sample["cls"] == b"x"


def test_handlers_by_extension_and_continuations():
    assert autodecode.handle_extension("seg.jpg cls", bytes.upper)(".a.seg.jpg", b"a") == b"A"
    assert autodecode.call_extension_handler(".cls", b"a", bytes.upper, ["seg.jpg", "cls"]) == b"A"
    assert autodecode.call_extension_handler(".jpg", b"a", bytes.upper, ["seg.jpg", "cls"]) is None
    going_on = autodecode.gzfilter(".json.gz", gzip.compress(b"1"))
    assert isinstance(going_on, autodecode.Continue)
    assert (going_on.key, going_on.data) == (".json", b"1")
    assert autodecode.gzfilter(".json", b"1") is None


def test_basic_handlers_decode_by_the_table_and_refuse_pickles():
    assert autodecode.basichandlers(".meta.json", b"[1]") == [1]
    assert autodecode.basichandlers(".jpg", b"x") is None
    with pytest.raises(DecodeError, match="runs any code"):
        autodecode.basichandlers(".pyd", pickle.dumps([1]))


def test_functions_for_pickles_can_be_named_by_the_table_of_functions():
    assert autodecode.decoders["pkl"](pickle.dumps([1])) == [1]
    assert autodecode.decoders["json"](b"[1]") == [1]
    with pytest.raises(TypeError):
        autodecode.decoders["xyz"] = bytes.upper
    decoder = autodecode.Decoder([autodecode.handle_extension("pyd", autodecode.unpickle_loads)])
    assert decoder({"pyd": pickle.dumps([1])}) == {"pyd": [1]}


@pytest.mark.usefixtures("secured")
def test_enforced_security_refuses_pickles_even_where_they_are_named():
    with pytest.raises(ValueError, match="Unpickling is not allowed for security reasons when enforce_security is set"):
        autodecode.unpickle_loads(pickle.dumps([1]))
    with pytest.raises(
        ValueError, match=r"torch\.loads is not allowed for security reasons when enforce_security is set"
    ):
        autodecode.torch_loads(b"")


def test_torch_loads_goes_to_torch_with_the_flags_as_they_are_then(monkeypatch):
    torch = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert autodecode.torch_loads(b"saved") == b"saved"
    monkeypatch.setattr(shardset.webdataset, "pytorch_weights_only", True)
    autodecode.torch_loads(b"")
    monkeypatch.setattr(shardset.webdataset, "pytorch_weights_only", False)
    monkeypatch.setattr(autodecode, "pytorch_weights_only", True)
    autodecode.torch_loads(b"")
    assert [options["weights_only"] for options in torch.asked] == [False, True, True]
    assert {options["map_location"] for options in torch.asked} == {"cpu"}


def test_torch_loads_without_torch_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"shardset\[torch\]"):
        autodecode.torch_loads(b"")


def test_payload_functions_have_webdatasets_names():
    buffer = io.BytesIO()
    np.savez(buffer, a=np.arange(3))
    assert autodecode.npz_loads(buffer.getvalue())["a"].tolist() == [0, 1, 2]
    assert autodecode.tenbin_loads(encode_tenbin([np.arange(3)]))[0].tolist() == [0, 1, 2]


# --- tenbin ---

ARRAYS = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array([7], np.uint32)]


def assert_arrays(found, expected=ARRAYS):
    assert len(found) == len(expected)
    for array, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array, wanted, strict=True)


def test_buffers_lists_and_chunks_go_there_and_back():
    payload = tenbin.encode_buffer(ARRAYS, infos=["a", "b"])
    assert payload == tenbin.encode_chunks(tenbin.encode_list(ARRAYS, infos=["a", "b"]))
    assert_arrays(tenbin.decode_buffer(payload))
    assert_arrays(tenbin.decode_list(tenbin.decode_chunks(payload)))
    arrays, infos = tenbin.decode_buffer(payload, infos=True)
    assert_arrays(arrays)
    assert infos == ["a", "b"]


def test_infos_that_are_required_are_compared():
    payload = tenbin.encode_buffer(ARRAYS, infos=["a", "b"])
    assert_arrays(tenbin.decode_buffer(payload, infos=["a", "b"]))
    with pytest.raises(ValueError, match="are required"):
        tenbin.decode_buffer(payload, infos=["a", "c"])
    with pytest.raises(ValueError, match="neither a bool"):
        tenbin.decode_buffer(payload, infos="ab")


def test_streams_and_files_go_there_and_back(tmp_path):
    stream = io.BytesIO()
    tenbin.write(stream, ARRAYS)
    assert stream.getvalue() == tenbin.encode_buffer(ARRAYS)
    stream.seek(0)
    assert_arrays(tenbin.read(stream, n=1), ARRAYS[:1])
    assert_arrays(tenbin.read(stream), ARRAYS[1:])
    path = str(tmp_path / "a.ten")
    tenbin.save(path, *ARRAYS, infos=["a", "b"])
    assert tenbin.load(path, infos=True)[1] == ["a", "b"]
    with pytest.raises(ValueError, match=r"ends in \.ten"):
        tenbin.save(str(tmp_path / "a.bin"), *ARRAYS)
    tenbin.save(str(tmp_path / "a.bin"), *ARRAYS, nocheck=True)
    assert_arrays(tenbin.load(str(tmp_path / "a.bin"), nocheck=True))
    with pytest.raises(ValueError, match=r"ends in \.ten"):
        tenbin.load(str(tmp_path / "a.bin"))


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (tenbin.encode_buffer(ARRAYS)[:100], TruncatedError),
        (tenbin.encode_buffer(ARRAYS)[:80], TruncatedError),
        (b"~TenBin~" + (1 << 62).to_bytes(8, "little") + b"few", TruncatedError),
        (b"~TenBin~" + bytes([255] * 8), FormatError),
        (b"~TenBin~123", TruncatedError),
        (b"nonsense", FormatError),
    ],
)
def test_a_damaged_stream_is_an_error(payload, kind):
    with pytest.raises(kind):
        tenbin.read(io.BytesIO(payload))


def test_small_functions_mean_what_they_do_there():
    assert tenbin.unstr64(tenbin.str64("f4")) == "f4"
    assert tenbin.unstr64(tenbin.magic) == tenbin.magic_str == "~TenBin~"
    assert tenbin.magic_bytes == b"~TenBin~"
    assert [tenbin.roundup(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
    assert tenbin.roundup(9, 8) == 16
    assert tenbin.bytelen(np.zeros(3, np.int16)) == tenbin.bytelen(bytes(6)) == 6
    assert bytes(tenbin.bytedata(np.zeros(3, np.int16))) == tenbin.bytedata(bytes(6)) == bytes(6)
    assert tenbin.long_to_short["uint32"] == "u4"
    assert tenbin.short_to_long["f2"] == "float16"
    shape, dtype, info = tenbin.decode_header(tenbin.encode_header(ARRAYS[0], "a"))
    assert (shape, dtype, info) == ((2, 3), np.float32, "a")
    for wrong in (tenbin.bytelen, tenbin.bytedata):
        with pytest.raises(ValueError, match="int"):
            wrong(3)
    with pytest.raises(ValueError, match="more than 8"):
        tenbin.str64("123456789")
    with pytest.raises(ValueError, match="requires a list"):
        tenbin.encode_buffer(tuple(ARRAYS))
    with pytest.raises(ValueError, match="1 infos for 2 arrays"):
        tenbin.encode_list(ARRAYS, infos=["a"])
    with pytest.raises(TruncatedError, match="without the elements"):
        tenbin.decode_list(tenbin.encode_list(ARRAYS)[:3])


def test_types_of_64_bits_are_to_be_allowed():
    tenbin.check_acceptable_input_type([np.zeros(1)], allow64=True)
    tenbin.check_acceptable_input_type(ARRAYS, allow64=False)
    with pytest.raises(ValueError, match="64 bits"):
        tenbin.check_acceptable_input_type([np.zeros(1)], allow64=False)
    with pytest.raises(ValueError, match="no bool"):
        tenbin.check_acceptable_input_type([np.zeros(1, bool)], allow64=True)
