"""Batches of all kinds of fields, of tar samples and of records, decoded as is usual or as is asked for."""

from __future__ import annotations

import gzip
import io
import json
import pickle

import av
import numpy as np
import PIL.Image
import pytest
import soundfile

from shardset.decoding.batches import BatchDecoder
from shardset.decoding.clips import Clip
from shardset.decoding.options import Decode
from shardset.errors import DecodeError


def image(size=(12, 8), kind="PNG", colour=(200, 10, 10)):
    buffer = io.BytesIO()
    PIL.Image.new("RGB", size, colour).save(buffer, kind)
    return buffer.getvalue()


def sound():
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros((800, 2), np.float32), 8000, format="WAV")
    return buffer.getvalue()


def film():
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for frame in [*(av.VideoFrame(32, 16, "yuv420p") for _ in range(5)), None]:
            output.mux(stream.encode(frame))
    return buffer.getvalue()


def decoded(field, payloads, options=None, **begin):
    batch = BatchDecoder(Decode() if options is None else options).begin(field, payloads, **begin)
    for place, payload in enumerate(payloads):
        batch.decode(place, payload, place)
    return batch.finish()


def test_without_options_everything_stays_as_it_is():
    payloads = [b'{"a": 1}', memoryview(b"2")]
    batch = BatchDecoder(None).begin("json", payloads)
    for place, payload in enumerate(payloads):
        batch.decode(place, payload, 0)
    assert all(value is payload for value, payload in zip(batch.finish(), payloads, strict=True))
    assert BatchDecoder(None).reads("mp4")


@pytest.mark.parametrize(
    ("field", "payloads", "wanted"),
    [
        ("txt", [b"a", memoryview(b"\xc3\xa4")], ["a", "\u00e4"]),
        ("meta.json", [b'{"a": 1}', b"null"], [{"a": 1}, None]),
        ("json.gz", [gzip.compress(b"[1]"), gzip.compress(b"[2]")], [[1], [2]]),
        ("mp4", [b"film", memoryview(b"film")], [b"film", b"film"]),
        ("unheard.of", [memoryview(b"x")], [b"x"]),
    ],
)
def test_fields_are_decoded_by_their_suffix(field, payloads, wanted):
    values = decoded(field, payloads)
    assert values == wanted
    assert not any(isinstance(value, memoryview) for value in values)


def test_numbers_become_arrays():
    assert decoded("cls", [b"3", memoryview(b"7")]).tolist() == [3, 7]
    assert decoded("score.json", [b"0.5", b"1.5"]).dtype == np.float64
    assert decoded("ok.json", [b"true", b"false"]).dtype == np.bool_
    buffer = io.BytesIO()
    np.save(buffer, np.arange(6, dtype=np.float32).reshape(2, 3))
    array = decoded("npy", [buffer.getvalue()] * 4)
    assert (array.shape, array.dtype) == ((4, 2, 3), np.float32)


@pytest.mark.parametrize("field", ["png", "PNG", "seg.png", "left.JPG", "webp"])
def test_images_become_one_array_whatever_they_are_called(field):
    assert decoded(field, [image()] * 2).shape == (2, 8, 12, 3)
    assert decoded(field, [image()] * 2, Decode(size=4)).shape == (2, 4, 4, 3)
    assert decoded(field, [image()] * 2, shape=(5, 6)).shape == (2, 5, 6, 3)


def test_images_in_a_gzip_are_unpacked_first():
    payloads = [gzip.compress(image())] * 2
    assert decoded("png.gz", payloads).shape == (2, 8, 12, 3)
    assert decoded("png.gz", payloads, shape=(5, 6)).shape == (2, 5, 6, 3)
    with pytest.raises(DecodeError, match="gzip"):
        decoded("png.gz", [image()])


def test_pickles_are_refused():
    with pytest.raises(DecodeError, match="runs any code"):
        decoded("pkl", [pickle.dumps(3)])


def test_what_is_said_of_a_field_wins_over_its_suffix():
    fields = {
        "png": "bytes",
        "picture": "image",
        "mask.png": Decode(size=(2, 3), mode="l"),
        "data": "json",
        "label": len,
    }
    options = Decode(size=4, fields=fields)
    assert decoded("png", [image()], options) == [image()]
    assert decoded("other.png", [image()], options).shape == (1, 4, 4, 3)
    assert decoded("picture", [image()], options).shape == (1, 4, 4, 3)
    assert decoded("mask.png", [image()], options).shape == (1, 2, 3, 1)
    assert decoded("data", [b"[1, 2]"], options) == [[1, 2]]
    assert decoded("label", [memoryview(b"four")], options).tolist() == [4]


def test_sound_and_video_are_decoded_where_they_are_named():
    options = Decode(fields={"wav": "audio", "mp4": "video"})
    ((samples, rate),) = decoded("wav", [sound()], options)
    assert (samples.shape, samples.dtype, rate) == ((2, 800), np.float32, 8000)
    (video,) = decoded("mp4", [film()], options)
    assert video.frames.shape == (5, 16, 32, 3)


def test_clips_of_one_shape_become_one_array():
    options = Decode(fields={"mp4": Clip(frames=2), "wav": Clip(seconds=0.05, rate=8000)})
    assert decoded("mp4", [film(), memoryview(film())], options).shape == (2, 2, 16, 32, 3)
    assert decoded("wav", [sound(), sound()], options).shape == (2, 2, 400)


def test_files_and_clips_are_not_read_before_they_are_decoded():
    decoder = BatchDecoder(Decode(fields={"mp4": "file", "webm": Clip(frames=1)}))
    assert [decoder.reads(field) for field in ("mp4", "webm", "png")] == [False, False, True]
    kept, used = io.BytesIO(film()), io.BytesIO(film())
    batch = decoder.begin("mp4", [kept])
    batch.decode(0, kept, 0)
    assert batch.finish() == [kept]
    assert not kept.closed
    batch = decoder.begin("webm", [used])
    batch.decode(0, used, 0)
    assert batch.finish().shape == (1, 1, 16, 32, 3)
    assert used.closed


# --- features of records ---------------------------------------------------------------------------------------------


def test_features_that_are_parsed_already_are_stacked_where_their_shapes_agree():
    assert decoded("label", [np.array([3]), np.array([4])]).tolist() == [[3], [4]]
    assert decoded("box", [np.zeros(4, np.float32)] * 3).shape == (3, 4)
    ragged = [np.zeros(4, np.float32), np.zeros(8, np.float32)]
    assert decoded("box", ragged) is not None
    assert isinstance(decoded("box", ragged), list)
    assert decoded("tags", [[b"a", b"b"], [b"c"]]) == [[b"a", b"b"], [b"c"]]
    assert decoded("nothing", [None]) == [None]


def test_features_that_are_called_like_a_suffix_stay_what_they_are():
    assert decoded("txt", [[b"one"], [b"two", b"three"]]) == [[b"one"], [b"two", b"three"]]
    assert decoded("jpg", [[b"no image"]]) == [[b"no image"]]
    assert decoded("rgb", [np.array([1, 2, 3])] * 2).tolist() == [[1, 2, 3]] * 2
    assert decoded("id", [np.array([1]), np.array([2])]).tolist() == [[1], [2]]


def test_a_feature_with_one_value_is_decoded_as_its_payload():
    options = Decode(fields={"image/encoded": "image", "meta": "json", "title": "text", "sizes": lambda value: value})
    assert decoded("image/encoded", [[image()]] * 2, options).shape == (2, 8, 12, 3)
    assert decoded("meta", [[b'{"a": 1}']], options) == [{"a": 1}]
    assert decoded("title", [[b"one"], [b"two", b"three"]], options) == ["one", ["two", "three"]]
    assert decoded("sizes", [np.array([2, 3])], options).tolist() == [[2, 3]]


@pytest.mark.parametrize(("how", "value"), [("image", [b"a", b"b"]), ("image", np.zeros(3)), ("json", []), ("json", 3)])
def test_a_feature_that_holds_no_payload_is_an_error_where_one_is_asked_for(how, value):
    with pytest.raises(DecodeError, match="where one payload is expected"):
        decoded("feature", [value], Decode(fields={"feature": how}))


def test_clips_of_what_is_no_file_are_an_error():
    with pytest.raises(DecodeError, match="where one payload is expected"):
        decoded("mp4", [None], Decode(fields={"mp4": Clip(frames=1)}))


# --- the decoder itself ----------------------------------------------------------------------------------------------


def test_a_batch_that_was_let_go_gives_its_memory_to_the_next():
    decoder = BatchDecoder(Decode())
    payloads = [image((400, 300))] * 4

    def once():
        batch = decoder.begin("png", payloads)
        for place, payload in enumerate(payloads):
            batch.decode(place, payload, 0)
        return batch.finish()

    places = {once().__array_interface__["data"][0] for _ in range(5)}
    assert len(places) == 1
    kept = once()
    image_of_it = kept[1]
    wanted = image_of_it.copy()
    del kept
    other = once()
    other[...] = 0
    assert np.array_equal(image_of_it, wanted)


def test_a_decoder_pickles_with_its_options():
    decoder = BatchDecoder(Decode(size=3, fields={"a": "json"}))
    decoder.begin("png", [image()])
    assert pickle.loads(pickle.dumps(decoder)).options == decoder.options


def test_names_of_fields_without_end_are_forgotten():
    decoder = BatchDecoder(Decode())
    for number in range(5000):
        decoder.begin(f"{number}.json", [json.dumps(number).encode()])
    assert len(decoder._hows) <= 4096


def test_a_scalar_is_the_only_value_of_a_feature():
    decoder = BatchDecoder(Decode(fields={"label": "scalar"}))
    batch = decoder.begin("label", [None] * 3)
    for place, value in enumerate([np.array([5]), np.array([6]), np.array([7])]):
        batch.decode(place, value, 0)
    assert batch.finish().tolist() == [5, 6, 7]
    batch = decoder.begin("label", [None])
    batch.decode(0, [b"text"], 0)
    assert batch.finish() == [b"text"]
    for wrong, count in ((np.array([1, 2]), 2), ([b"a", b"b"], 2), (np.array([]), 0), (None, 0)):
        with pytest.raises(DecodeError, match=f"it has {count} values"):
            batch.decode(0, wrong, 0)
