"""Small videos that FFmpeg writes (through PyAV), what it says of them, and the boxes and elements to change them."""

from __future__ import annotations

import functools
import io
import tempfile
from fractions import Fraction
from pathlib import Path

from formats.picture_builder import box, split_boxes

CORNER = 16


@functools.cache
def video(  # noqa: PLR0917
    kind, codec, size=(64, 48), frames=12, rate=Fraction(25), aspect=None, sound=None, options=(), step=1
):
    """Write a white video with a red square in the upper left corner.

    Args:
        kind: FFmpeg's name of the container.
        codec: Of the pictures; None for none.
        size: Width and height.
        frames: How many.
        rate: Frames a second.
        aspect: Of a pixel.
        sound: A codec for a track of silence, which is written first.
        options: Of the container.
        step: How many times longer each frame lasts from the middle on.
    """
    with tempfile.TemporaryDirectory() as folder:  # what moves the header to the front opens the file again by name
        path = Path(folder) / "video"
        _write(path, kind, codec, size, frames, rate, aspect, sound, options, step)
        return path.read_bytes()


def _write(path, kind, codec, size, frames, rate, aspect, sound, options, step):  # noqa: PLR0917
    import av

    with av.open(str(path), "w", format=kind, options=dict(options)) as container:
        track = container.add_stream(sound, rate=48_000) if sound else None
        stream = container.add_stream(codec, rate=rate) if codec else None
        if track:
            track.layout = "mono"
        if stream:
            stream.width, stream.height = size
            stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
            stream.codec_context.sample_aspect_ratio = aspect or 1
        for frame in _silence() if track else ():
            container.mux(track.encode(frame))
        for frame in _pictures(size, frames, rate, step) if stream else ():
            container.mux(stream.encode(frame))


def _silence():
    import av
    import numpy as np

    for place in range(20):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 960), np.float32), "fltp", "mono")
        frame.sample_rate, frame.pts, frame.time_base = 48_000, 960 * place, Fraction(1, 48_000)
        yield frame
    yield None


def _pictures(size, frames, rate, step):
    import av
    import numpy as np

    picture = np.full((size[1], size[0], 3), 255, np.uint8)
    picture[:CORNER, :CORNER, 1:] = 0
    for place in range(frames):
        frame = av.VideoFrame.from_ndarray(picture, "rgb24")
        frame.pts, frame.time_base = place + max(0, place - frames // 2) * (step - 1), 1 / rate
        yield frame
    yield None


def probe(payload):
    """Return FFmpeg's size, aspect of a pixel, duration and rate of a video; a file of sound has a duration alone."""
    import av

    with av.open(io.BytesIO(payload)) as container:
        duration = container.duration and container.duration / 1e6
        if not container.streams.video:
            return None, None, duration, None
        stream = container.streams.video[0]
        aspect = float(stream.sample_aspect_ratio or 1)
        return (stream.width, stream.height), aspect, duration, float(stream.average_rate or 0) or None


def probe_turn(payload):
    """Return FFmpeg's display matrix of the first frame, as the signs of a, b, c and d."""
    import av
    import numpy as np

    with av.open(io.BytesIO(payload)) as container:
        frame = next(container.decode(video=0))
        data = frame.side_data.get("DISPLAYMATRIX")
        if data is None:
            return 1, 0, 0, 1
        matrix = np.frombuffer(bytes(data), "<i4")
        return tuple(int(sign) for sign in np.sign(matrix[[0, 1, 3, 4]]))


# --- boxes ---


def change_boxes(data, path, change):
    """Give the content of the boxes at `path` (names) to `change`, and write the file with what comes back.

    ``moov`` must come last, or the places of frames in it would be wrong.
    """
    parts = []
    for name, content in split_boxes(data):
        if name == path[0]:
            changed = change(content) if len(path) == 1 else change_boxes(content, path[1:], change)
            parts.append(changed if isinstance(changed, tuple) else (name, changed))
        else:
            parts.append((name, content))
    return b"".join(box(name, content) for name, content in parts)


# --- elements ---


def element(identifier, content, width=8):
    """Write an element, with its length in so many bytes; None for `width` stands for an unknown length."""
    name = identifier.to_bytes((identifier.bit_length() + 7) // 8, "big")
    if width is None:
        return name + b"\x01" + b"\xff" * 7 + content
    return name + (1 << 7 * width | len(content)).to_bytes(width, "big") + content


def number(identifier, value):
    return element(identifier, value.to_bytes(max(1, (value.bit_length() + 7) // 8), "big"), 1)


def split_elements(data):
    """Return (identifier, content) of the elements in `data`, all of known length."""
    elements, at = [], 0
    while at < len(data):
        size = 9 - data[at].bit_length()
        width = 9 - data[at + size].bit_length()
        start = at + size + width
        length = int.from_bytes(data[at + size : start], "big") & ((1 << 7 * width) - 1)
        elements.append((int.from_bytes(data[at : at + size], "big"), data[start : start + length]))
        at = start + length
    return elements


def change_elements(data, path, change):
    """Give the content of the elements at `path` (identifiers) to `change`, and write the file with what comes back."""
    return b"".join(
        element(
            name,
            content
            if name != path[0]
            else change(content)
            if len(path) == 1
            else change_elements(content, path[1:], change),
        )
        for name, content in split_elements(data)
    )
