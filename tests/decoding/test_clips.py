"""Parts of films and of sound: the right frame and the right sample, out of files that are hardly read."""

from __future__ import annotations

import io
import sys

import av
import numpy as np
import pytest

from films import CONTAINERS, RATE, Counted, film, m4a, numbers, tone
from shardset.decoding import clips as module
from shardset.decoding.clips import Clip, decode_clip
from shardset.decoding.media import decode_video
from shardset.errors import DecodeError, MissingExtraError


@pytest.mark.parametrize("options", CONTAINERS.values(), ids=CONTAINERS)
def test_frames_are_those_of_the_whole_film(options):
    payload = film(*options)
    whole, _, info = decode_video(payload)
    rate = info["video_fps"]  # 25 is taken for a bare stream, which does not say it
    assert numbers(whole) == list(range(60))
    for first, count, every in ((0, 4, 1), (7, 3, 2), (12, 1, 1), (23, 5, 1), (35, 4, 5), (59, 1, 1)):
        frames = decode_clip(payload, Clip(frames=count, start=first / rate, every=every))
        assert numbers(frames) == list(range(first, first + count * every, every))
        assert np.array_equal(frames, whole[first : first + count * every : every])


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_the_frame_that_is_shown_at_the_start_is_the_first(container):
    payload = film(container, "libx264", rate=10)
    assert [numbers(decode_clip(payload, Clip(frames=1, start=at)))[0] for at in (0.0, 0.05, 0.1, 0.19, 2.35)] == [
        *(0, 0, 1, 1),
        23,
    ]


def test_a_clip_ends_where_the_film_does():
    payload = film()
    assert numbers(decode_clip(payload, Clip(frames=8, start=57 / 24))) == [57, 58, 59]
    with pytest.raises(DecodeError, match=r"no frame at 2\.6 seconds"):
        decode_clip(payload, Clip(frames=8, start=2.6))


def test_a_random_start_is_decided_by_the_seed_and_leaves_room_for_the_clip():
    payload = film()
    clip = Clip(frames=10, start="random", every=2)
    firsts = set()
    for seed in range(40):
        frames = decode_clip(payload, clip, seed)
        assert len(frames) == 10
        first = numbers(frames)[0]
        assert numbers(frames) == list(range(first, first + 20, 2))
        firsts.add(first)
    assert numbers(decode_clip(payload, clip, 3)) == numbers(decode_clip(payload, clip, 3))
    assert len(firsts) > 15
    assert max(firsts) <= 40
    short = film(frames=5)
    assert numbers(decode_clip(short, clip, 9)) == [0, 2, 4]


def test_a_bare_stream_has_no_length_to_choose_a_start_from():
    with pytest.raises(DecodeError, match="does not say how long it is"):
        decode_clip(film("h264", "libx264"), Clip(frames=1, start="random"))


def test_of_a_long_film_little_is_read():
    rng = np.random.default_rng(3)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        stream = output.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 128, 96, "yuv420p", 8_000_000
        stream.gop_size = 5
        for _ in range(100):
            picture = rng.integers(0, 255, (96, 128, 3), np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        output.mux(stream.encode(None))
    file = Counted(buffer.getvalue())
    size = len(buffer.getvalue())
    frames = decode_clip(file, Clip(frames=2, start=7.0))
    assert np.array_equal(frames, decode_video(buffer.getvalue()).frames[70:72])
    assert not file.closed
    assert file.count < size / 4


def test_a_file_without_video_is_an_error():
    with pytest.raises(DecodeError, match="no video"):
        decode_clip(tone("WAV")[0], Clip(frames=1))


def test_what_is_no_film_is_an_error():
    with pytest.raises((ValueError, OSError)):
        decode_clip(b"no film" * 100, Clip(frames=1))


def test_a_clip_that_takes_too_much_is_refused(monkeypatch):
    monkeypatch.setattr("shardset.decoding.media.MAX_DECODED", 64 * 48 * 3 * 4)
    assert len(decode_clip(film(), Clip(frames=4))) == 4
    with pytest.raises(DecodeError, match="decodes to more than"):
        decode_clip(film(), Clip(frames=5))


# --- sound -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "AIFF"])
def test_sound_begins_at_the_sample_that_is_asked_for(kind):
    payload, whole = tone(kind)
    for start, seconds in ((0.0, 0.5), (0.625, 1.0), (2.9, 0.1)):
        samples = decode_clip(payload, Clip(seconds=seconds, start=start, rate=RATE))
        first = round(start * RATE)
        assert samples.dtype == np.float32
        assert samples.flags.c_contiguous
        assert np.allclose(samples, whole[:, first : first + round(seconds * RATE)], atol=1e-3)


def test_sound_that_soundfile_does_not_read_begins_there_too():
    payload, wanted = m4a()
    for start, seconds in ((0.0, 0.5), (0.625, 1.0), (2.0, 0.5)):
        samples = decode_clip(payload, Clip(seconds=seconds, start=start, rate=RATE))
        first, count = round(start * RATE), round(seconds * RATE)
        assert samples.shape == (2, count)
        assert np.allclose(samples, wanted[:, first : first + count], atol=1e-4)


@pytest.mark.parametrize("make", [lambda: tone("WAV"), m4a], ids=["wav", "m4a"])
@pytest.mark.parametrize("rate", [4000, 16_000, 11_025])
def test_sound_of_another_rate_is_resampled(make, rate):
    payload, whole = make()
    samples = decode_clip(payload, Clip(seconds=1.0, start=0.5, rate=rate))
    assert samples.shape == (2, rate)
    assert samples.dtype == np.float32
    # At most 500 Hz are in it, so between two samples it is nearly straight.
    wanted = np.interp(np.arange(rate) / rate, np.arange(RATE) / RATE, whole[0, RATE // 2 : RATE // 2 + RATE])
    inner = slice(rate // 20, -rate // 20)
    assert np.abs(samples[0, inner] - wanted[inner]).mean() < 0.02


def test_sound_is_shorter_where_the_file_ends():
    payload, whole = tone("WAV", channels=1)
    assert np.allclose(decode_clip(payload, Clip(seconds=9, start=2.5, rate=RATE)), whole[:, 20_000:], atol=1e-4)
    assert decode_clip(payload, Clip(seconds=9, start=2.5, rate=2 * RATE)).shape == (1, RATE)
    with pytest.raises(DecodeError, match=r"no sound at 3\.5 seconds"):
        decode_clip(payload, Clip(seconds=1, start=3.5, rate=RATE))


def test_many_channels_are_resampled_too():
    payload, _ = tone("WAV", channels=11, seconds=1)
    assert decode_clip(payload, Clip(seconds=0.5, rate=2 * RATE)).shape == (11, RATE)


def test_a_random_part_of_sound_is_decided_by_the_seed():
    payload, whole = tone("WAV", channels=1)
    clip = Clip(seconds=1, start="random", rate=RATE)
    firsts = set()
    for seed in range(20):
        samples = decode_clip(payload, clip, seed)
        assert samples.shape == (1, RATE)
        near = np.flatnonzero(np.abs(whole[0, : 2 * RATE + 1] - samples[0, 0]) < 1e-6)
        firsts |= {at for at in near.tolist() if np.allclose(whole[0, at : at + RATE], samples[0])}
    assert len(firsts) == 20


def test_of_long_sound_little_is_read():
    payload, _ = tone("WAV", seconds=60)
    file = Counted(payload)
    assert decode_clip(file, Clip(seconds=1, start=40, rate=RATE)).shape == (2, RATE)
    assert file.count < len(payload) / 10


def test_without_an_extra_its_name_is_said(monkeypatch):
    payload, _ = tone("WAV")
    monkeypatch.setitem(sys.modules, "av", None)
    assert decode_clip(payload, Clip(seconds=1, rate=RATE)).shape == (2, RATE)
    with pytest.raises(MissingExtraError, match=r"resampled(?s:.)*shardset\[video\]"):
        decode_clip(payload, Clip(seconds=1, rate=2 * RATE))
    with pytest.raises(MissingExtraError, match=r"shardset\[video\]"):
        decode_clip(film(), Clip(frames=1))
    with pytest.raises(DecodeError, match=r"shardset\[video\]"):
        decode_clip(m4a()[0], Clip(seconds=1, rate=RATE))
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MissingExtraError, match=r"shardset\[audio\]"):
        decode_clip(payload, Clip(seconds=1, rate=RATE))
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    for clip in (Clip(seconds=1, rate=RATE, decoder="torchcodec"), Clip(frames=1, decoder="torchcodec")):
        with pytest.raises(MissingExtraError, match=r"shardset\[torchcodec\]"):
            decode_clip(payload, clip)


def test_a_table_of_key_frames_that_leads_too_far_is_not_believed(monkeypatch):
    payload = film()
    seek = module._seek
    monkeypatch.setattr(module, "_seek", lambda container, stream, pts: seek(container, stream, pts and pts + 12_288))
    assert numbers(decode_clip(payload, Clip(frames=3, start=20 / 24))) == [20, 21, 22]


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"frames": 3, "seconds": 1.0, "rate": 8000},
        {"frames": 3, "rate": 8000},
        {"seconds": 1.0},
        {"frames": 0},
        {"frames": 2.5},
        {"frames": 2, "every": 0},
        {"seconds": -1, "rate": 8000},
        {"seconds": float("inf"), "rate": 8000},
        {"seconds": 1.0, "rate": 0},
        {"frames": 2, "start": -1},
        {"frames": 2, "start": "middle"},
        {"frames": 2, "start": float("nan")},
    ],
    ids=str,
)
def test_a_clip_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=r"[a-z]"):
        Clip(**wrong)
