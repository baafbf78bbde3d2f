"""Parts of films and of sound by torchcodec, beside those by PyAV and soundfile."""

from __future__ import annotations

import io
import sys
import types
from fractions import Fraction

import av
import numpy as np
import pytest

from films import CONTAINERS, RATE, film, m4a, numbers, tone
from shards import write_shard
from shardset import Clip, Decode, Loader, discover_dataset
from shardset.decoding.clips import decode_clip
from shardset.errors import DecodeError, MissingExtraError
from shardset.policy import Policy

KNOWN = {name: options for name, options in CONTAINERS.items() if name not in {"bare", "mpg"}}


def both(payload, seed=0, **options):
    """Return a clip as both decoders give it."""
    return [decode_clip(payload, Clip(**options, decoder=decoder), seed) for decoder in ("torchcodec", "pyav")]


@pytest.mark.parametrize("options", KNOWN.values(), ids=KNOWN)
def test_frames_are_those_that_pyav_gives(options):
    payload = film(*options)
    for first, count, every in ((0, 4, 1), (7, 3, 2), (12, 1, 1), (23, 5, 1), (35, 4, 5), (59, 1, 1), (57, 8, 1)):
        ours, pyav = both(payload, frames=count, start=first / 24, every=every)
        assert numbers(ours) == numbers(pyav)
        assert ours.shape == pyav.shape
        assert (ours.dtype, ours.flags.c_contiguous) == (np.uint8, True)
        assert np.abs(ours.astype(int) - pyav).mean() < 3


def test_every_frame_is_found_by_any_time_at_which_it_is_shown():
    payload = film("matroska", "libx264", rate=10, frames=30)
    for time in np.arange(0, 3, 0.05).round(3).tolist():
        ours, pyav = both(payload, frames=2, start=time)
        assert numbers(ours) == numbers(pyav)


def test_frames_that_are_shown_for_different_times_are_found():
    buffer = io.BytesIO()
    shown = [0, 1, 2, 10, 11, 30, 31, 32, 60, 90]
    with av.open(buffer, "w", format="matroska") as output:
        stream = output.add_stream("mpeg4", rate=30)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number, pts in enumerate(shown):
            picture = np.zeros((48, 64, 3), np.uint8)
            for bit in range(8):
                picture[:, bit * 8 : bit * 8 + 8] = 255 * (number >> bit & 1)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = pts, Fraction(1, 30)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    for at in (0.0, 0.2, 0.34, 0.5, 1.0, 1.5, 2.5):
        ours, pyav = both(buffer.getvalue(), frames=3, start=at)
        wanted = int(np.searchsorted(np.array(shown) / 30, at + 0.001, side="right")) - 1
        assert numbers(ours)[0] == numbers(pyav)[0] == wanted
        assert numbers(ours) == numbers(pyav)


def test_a_random_start_is_the_same_for_both():
    payload = film()
    for seed in range(12):
        ours, pyav = both(payload, seed, frames=10, start="random", every=2)
        assert numbers(ours) == numbers(pyav)
    for seed in range(6):
        ours, other = both(tone("WAV")[0], seed, seconds=0.5, start="random", rate=RATE)
        assert np.allclose(ours, other, atol=1e-3)


def test_a_rotation_is_left_to_who_wants_it():
    payload = film()
    buffer = io.BytesIO()
    with av.open(io.BytesIO(payload)) as source, av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream_from_template(source.streams.video[0])
        stream.metadata["rotate"] = "90"
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                output.mux(packet)
    turned = buffer.getvalue().replace(MATRIX, QUARTER, 2)  # of the movie and of its track
    from torchcodec.decoders import VideoDecoder

    assert VideoDecoder(turned).metadata.rotation
    ours, pyav = both(turned, frames=4, start=0.5)
    assert numbers(ours) == numbers(pyav) == [12, 13, 14, 15]


# Matrices of ISO/IEC 14496-12, 8.2.2: nothing is turned, and a quarter.
MATRIX = b"".join(n.to_bytes(4, "big") for n in (0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000))
QUARTER = b"".join(n.to_bytes(4, "big") for n in (0, 0x10000, 0, 0xFFFF0000, 0, 0, 0x300000, 0, 0x40000000))


@pytest.mark.parametrize("make", [lambda: tone("WAV"), lambda: tone("FLAC"), m4a], ids=["wav", "flac", "m4a"])
def test_sound_is_what_the_others_give(make):
    payload, _ = make()
    for start, seconds in ((0.0, 0.5), (0.625, 1.0), (2.9, 0.1), (2.5, 9.0)):
        ours, other = both(payload, seconds=seconds, start=start, rate=RATE)
        assert ours.dtype == np.float32
        assert abs(ours.shape[1] - other.shape[1]) <= (1024 if make is m4a else 0)
        shared = min(ours.shape[1], other.shape[1])
        assert np.allclose(ours[:, :shared], other[:, :shared], atol=2e-3)


@pytest.mark.parametrize("rate", [4000, 16_000, 11_025])
def test_sound_of_another_rate_is_resampled(rate):
    ours, other = both(tone("WAV")[0], seconds=1.0, start=0.5, rate=rate)
    assert ours.shape == other.shape == (2, rate)
    inner = slice(rate // 20, -rate // 20)
    assert np.abs(ours[:, inner] - other[:, inner]).mean() < 0.02


def test_what_is_not_there_is_an_error():
    with pytest.raises(DecodeError, match=r"no frame at 9 seconds"):
        decode_clip(film(), Clip(frames=1, start=9, decoder="torchcodec"))
    with pytest.raises(DecodeError, match=r"no sound at 9 seconds"):
        decode_clip(tone("WAV")[0], Clip(seconds=1, start=9, rate=RATE, decoder="torchcodec"))
    for clip in (Clip(frames=1, decoder="torchcodec"), Clip(seconds=1, rate=RATE, decoder="torchcodec")):
        with pytest.raises((RuntimeError, ValueError, DecodeError)):
            decode_clip((film() if clip.frames is None else tone("WAV")[0]), clip)
        with pytest.raises((RuntimeError, ValueError, DecodeError)):
            decode_clip(film()[:200], clip)


@pytest.mark.parametrize("playlist", [b"#EXTM3U\n#EXTINF:1,\n%s\n", b"ffconcat version 1.0\nfile %s\n"])
def test_playlists_do_not_come_to_it(tmp_path, playlist):
    other = tmp_path / "other.mp4"
    other.write_bytes(film())
    listed = playlist % str(other).encode()
    tag = b"ID3\4\0\0" + bytes((0, 0, 0, 20)) + bytes(20)
    for payload in (listed, tag + listed, tag + tag + listed):
        with pytest.raises(DecodeError, match="torchcodec is given"):
            decode_clip(payload, Clip(frames=1, decoder="torchcodec"))


@pytest.mark.parametrize("name", ["bare", "mpg"])
def test_kinds_in_which_it_does_not_find_frames_are_refused(name):
    with pytest.raises(DecodeError, match=r"torchcodec is given(?s:.)*leave decoder= away"):
        decode_clip(film(*CONTAINERS[name]), Clip(frames=1, decoder="torchcodec"))


def test_a_loader_gives_them(tmp_path):
    write_shard(
        tmp_path / "a.tar",
        [
            (f"{number}.{suffix}", film(frames=40) if suffix == "mp4" else tone("WAV")[0])
            for number in range(6)
            for suffix in ("mp4", "wav")
        ],
    )
    fields = {
        "mp4": Clip(frames=8, start="random", decoder="torchcodec"),
        "wav": Clip(seconds=0.5, start="random", rate=RATE, decoder="torchcodec"),
    }
    dataset = discover_dataset(tmp_path)
    streams = []
    for each in (fields, {name: Clip(**{**options(clip), "decoder": "pyav"}) for name, clip in fields.items()}):
        loader = Loader(dataset, 3, shuffle=True, seed=5, fields=["mp4", "wav"], decode=Decode(fields=each))
        streams.append(list(loader))
    for ours, other in zip(*streams, strict=True):
        assert ours["__key__"] == other["__key__"]
        assert ours["mp4"].shape == (3, 8, 48, 64, 3)
        assert [numbers(frames) for frames in ours["mp4"]] == [numbers(frames) for frames in other["mp4"]]
        assert np.allclose(ours["wav"], other["wav"], atol=2e-3)


def options(clip):
    return {name: getattr(clip, name) for name in clip.__dataclass_fields__}


def test_a_damaged_film_is_left_to_the_policy(tmp_path):
    write_shard(tmp_path / "a.tar", [(f"{n}.mp4", film()[: 400 if n == 2 else None]) for n in range(4)])
    loader = Loader(
        discover_dataset(tmp_path),
        1,
        fields=["mp4"],
        decode=Decode(fields={"mp4": Clip(frames=2, decoder="torchcodec")}),
        policy=Policy(on_error="skip"),
    )
    assert len(list(loader)) == 4
    assert loader.report.counts


def test_an_ffmpeg_that_is_missing_is_said(monkeypatch):
    class Broken(types.ModuleType):
        def __getattr__(self, name):
            raise RuntimeError("Could not load libtorchcodec.\nlong story")

    monkeypatch.setitem(sys.modules, "torchcodec", Broken("torchcodec"))
    with pytest.raises(MissingExtraError, match=r"FFmpeg's shared libraries(?s:.)*Could not load libtorchcodec") as met:
        decode_clip(film(), Clip(frames=1, decoder="torchcodec"))
    assert "long story" not in str(met.value)
