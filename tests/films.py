"""Films and sounds for tests, whose frames tell their numbers and whose samples are known."""

from __future__ import annotations

import io

import av
import numpy as np
import soundfile

from shardset.decoding.media import decode_audio

RATE = 8000
CONTAINERS = {
    "mp4": ("mp4", "mpeg4"),
    "mp4 with frames that look ahead": ("mp4", "libx264"),
    "mkv": ("matroska", "libx264"),
    "avi": ("avi", "mpeg4"),
    "mpg": ("mpeg", "mpeg2video"),
    "webm": ("webm", "libvpx"),
    "bare": ("h264", "libx264"),
}


def film(container="mp4", codec="mpeg4", *, frames=60, rate=24):
    """Return a film each of whose frames has its number in it: a row of black and white squares."""
    size = (64, 48)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.gop_size = 12
        for number in range(frames):
            picture = np.zeros((size[1], size[0], 3), np.uint8)
            for bit in range(8):
                picture[:, bit * 8 : bit * 8 + 8] = 255 * (number >> bit & 1)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def numbers(frames):
    """Return the numbers that stand in frames."""
    bits = frames[:, :, :, 1].mean(axis=1).reshape(len(frames), 8, -1).mean(axis=2) > 127
    return (bits << np.arange(8)).sum(axis=1).tolist()


class Counted(io.BytesIO):
    """A file that counts the bytes that are read from it."""

    count = 0

    def read(self, size=-1):
        piece = super().read(size)
        self.count += len(piece)
        return piece

    def readinto(self, buffer):
        count = super().readinto(buffer)
        self.count += count
        return count


def tone(kind, channels=2, seconds=3, subtype=None):
    """Return sound as a file, and what it is decoded to as a whole: a tone that rises."""
    at = np.arange(RATE * seconds) / RATE
    samples = 0.5 * np.sin(2 * np.pi * (200 + 100 * at) * at)
    samples = np.stack([samples * (1 - 0.5 * channel) for channel in range(channels)], axis=1)
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, RATE, format=kind, subtype=subtype)
    whole, _ = soundfile.read(io.BytesIO(buffer.getvalue()), dtype="float32", always_2d=True)
    return buffer.getvalue(), whole.T


def m4a(channels=2, seconds=3):
    """Return sound that soundfile does not read, and what it is decoded to as a whole, the pause at its start too."""
    at = np.arange(RATE * seconds) / RATE
    samples = (0.5 * np.sin(2 * np.pi * (200 + 100 * at) * at)).astype(np.float32)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("aac", rate=RATE, layout="stereo" if channels == 2 else "mono")
        frame = av.AudioFrame.from_ndarray(np.stack([samples] * channels), format="fltp", layout=stream.layout.name)
        frame.sample_rate = RATE
        for piece in (frame, None):
            output.mux(stream.encode(piece))
    return buffer.getvalue(), decode_audio(buffer.getvalue())[0]
