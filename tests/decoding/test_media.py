"""Video and sound, made by PyAV and soundfile themselves; and files that would have the decoder open other files."""

from __future__ import annotations

import io
import sys

import av
import numpy as np
import pytest
import soundfile

from shardset.decoding import media as module
from shardset.decoding.media import AUDIO_SUFFIXES, VIDEO_SUFFIXES, decode_audio, decode_video, torch_audio, torch_video
from shardset.decoding.registry import USUAL
from shardset.errors import DecodeError, MissingExtraError

RATE = 48_000
CONTAINERS = {
    "mp4": ("mp4", "mpeg4", "aac"),
    "mov": ("mov", "mpeg4", "aac"),
    "avi": ("avi", "mpeg4", "mp3"),
    "mpg": ("mpeg", "mpeg2video", "mp2"),
    "webm": ("webm", "libvpx", "libopus"),
    "wmv": ("asf", "wmv2", "mp3"),
}


def film(container="mp4", video="mpeg4", audio="aac", frames=8, size=(64, 48)):
    """Return a film whose frames grow brighter, with a second of a tone in two channels."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        streams = []
        if video:
            picture = output.add_stream(video, rate=24)
            picture.width, picture.height, picture.pix_fmt = *size, "yuv420p"
            shades = (np.full((size[1], size[0], 3), 20 * number, np.uint8) for number in range(frames))
            streams.append((picture, [av.VideoFrame.from_ndarray(shade, format="rgb24") for shade in shades]))
        if audio:
            sound = output.add_stream(audio, rate=RATE, layout="stereo")
            tone = np.sin(np.arange(RATE) * 2 * np.pi * 440 / RATE).astype(np.float32) / 2
            frame = av.AudioFrame.from_ndarray(np.stack([tone, tone]), format="fltp", layout="stereo")
            frame.sample_rate = RATE
            streams.append((sound, [frame]))
        for stream, pieces in streams:
            for piece in [*pieces, None]:
                output.mux(stream.encode(piece))
    return buffer.getvalue()


@pytest.mark.parametrize("options", CONTAINERS.values(), ids=CONTAINERS)
def test_a_video_gives_frames_sound_and_rates(options):
    frames, sound, info = decode_video(film(*options))
    assert frames.shape == (8, 48, 64, 3)
    assert frames.dtype == np.uint8
    assert np.abs(frames.mean((1, 2, 3)) - 20 * np.arange(8)).max() < 6
    assert sound.dtype == np.float32
    assert sound.shape[0] == 2
    assert abs(sound.shape[1] - RATE) < RATE / 10
    assert 0.4 < np.abs(sound).max() < 0.6
    assert info["audio_fps"] == RATE
    assert info.get("video_fps", 24.0) == 24.0


def test_a_video_without_sound_has_none():
    frames, sound, info = decode_video(film(audio=None))
    assert len(frames) == 8
    assert sound.shape == (0, 0)
    assert info == {"video_fps": 24.0}


def test_a_file_without_video_is_no_video():
    with pytest.raises(DecodeError, match="has no video"):
        decode_video(film(video=None))


@pytest.mark.parametrize(("kind", "subtype"), [("WAV", "PCM_16"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("MP3", None)])
def test_sound_gives_channels_by_samples_and_the_rate(kind, subtype):
    tone = np.sin(np.arange(16_000) / 9)
    buffer = io.BytesIO()
    soundfile.write(buffer, np.stack([tone, -tone], axis=1) / 2, 16_000, format=kind, subtype=subtype)
    samples, rate = decode_audio(buffer.getvalue())
    assert rate == 16_000
    assert samples.dtype == np.float32
    assert samples.shape[0] == 2
    assert samples.flags.c_contiguous
    middle = slice(4000, 12_000)
    assert np.abs(samples[0, middle] + samples[1, middle]).max() < 0.02
    assert 0.4 < np.abs(samples).max() < 0.6


def test_sound_that_soundfile_does_not_know_is_read_by_pyav():
    samples, rate = decode_audio(film("mp4", None, "aac"))
    assert rate == RATE
    assert samples.shape[0] == 2


def test_without_pyav_such_sound_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(DecodeError, match=r"soundfile cannot read it.*shardset\[video\]"):
        decode_audio(film("mp4", None, "aac"))


@pytest.mark.parametrize("payload", [b"", b"\0" * 1000, film()[:500], b"RIFF\xff\xff\xff\x7fWAVEfmt "])
@pytest.mark.parametrize("decode", [decode_video, decode_audio])
def test_what_is_neither_is_an_error(payload, decode):
    with pytest.raises((ValueError, OSError)):
        decode(payload)


@pytest.mark.parametrize(
    "playlist",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{path}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '{path}'\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 9 RTP/AVP 96\n",
    ],
    ids=["HLS", "concat", "SDP"],
)
@pytest.mark.parametrize("decode", [decode_video, decode_audio])
def test_playlists_open_no_other_file(playlist, decode, tmp_path):
    path = tmp_path / "other.avi"
    path.write_bytes(film("avi", "mpeg4", "mp3"))
    with pytest.raises(ValueError, match=r"Invalid data|Invalid argument"):
        decode(playlist.format(path=path).encode())


def test_formats_that_are_not_named_are_not_known():
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="yuv4mpegpipe") as output:
        stream = output.add_stream("wrapped_avframe", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        output.mux(stream.encode(av.VideoFrame(64, 48, "yuv420p")))
    with av.open(io.BytesIO(buffer.getvalue())) as found:
        assert found.format.name == "yuv4mpegpipe"
    with pytest.raises(ValueError, match="Invalid argument"):
        decode_video(buffer.getvalue())


def test_what_would_take_too_much_memory_is_refused(monkeypatch):
    payload = film()
    monkeypatch.setattr(module, "MAX_DECODED", 3 * 64 * 48 * 8 - 1)
    with pytest.raises(DecodeError, match="more than 73727 bytes"):
        decode_video(payload)
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(20_000), 8000, format="WAV")
    with pytest.raises(DecodeError, match="more than 73727 bytes"):
        decode_audio(buffer.getvalue())


def test_a_wav_that_promises_more_than_it_has_gives_what_it_has():
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(100), 8000, format="WAV", subtype="PCM_16")
    payload = bytearray(buffer.getvalue())
    at = payload.index(b"data") + 4
    payload[at : at + 4] = (0x7FFFFFF0).to_bytes(4, "little")
    samples, rate = decode_audio(bytes(payload))
    assert (samples.shape, rate) == ((1, 100), 8000)


def test_a_registry_takes_decoders_of_video_and_sound():
    registry = USUAL.extended(dict.fromkeys(VIDEO_SUFFIXES, decode_video) | dict.fromkeys(AUDIO_SUFFIXES, decode_audio))
    assert registry.decode("left.mp4", film()).frames.shape == (8, 48, 64, 3)
    with pytest.raises(DecodeError, match="field 'mp4'"):
        registry.decode("mp4", b"nonsense")


@pytest.mark.parametrize("handler", [torch_video, torch_audio])
def test_handlers_leave_other_fields_alone(handler):
    assert handler(".jpg", b"") is None
    assert handler(".mp4.txt", b"") is None


@pytest.mark.parametrize(("handler", "key"), [(torch_video, ".MP4"), (torch_audio, ".a.wav")])
def test_without_torch_the_extra_is_named(handler, key, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"shardset\[torch\]"):
        handler(key, b"")


@pytest.mark.parametrize(
    ("decode", "name", "extra"), [(decode_video, "av", "video"), (decode_audio, "soundfile", "audio")]
)
def test_without_the_package_the_extra_is_named(decode, name, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"shardset\[{extra}\]"):
        decode(b"")
