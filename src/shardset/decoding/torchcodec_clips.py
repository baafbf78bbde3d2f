"""Parts of films and of sound as torchcodec decodes them: the same parts that PyAV gives, where that was asked for.

It is told by nobody which kinds of files it may open, and FFmpeg, which it stands on, knows playlists that name other
files. So only what shows itself as a film or as sound by its first bytes comes to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np

from shardset.errors import DecodeError, MissingExtraError
from shardset.formats.geometry import sniff_kind

from .media import _check_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .clips import Clip

    Start = Callable[[float | None, float], float]

# Not MPEG program streams, of which torchcodec 0.13 gives other frames than those that are asked for.
_KINDS: Final = frozenset(("mp4", "mov", "m4a", "mkv", "webm", "avi", "wav", "flac", "ogg", "mp3", "aac"))
_HEAD_BYTES: Final = 64
_MOST_TAGS: Final = 16


def film_frames(source: BinaryIO, clip: Clip, start_of: Start, *, tolerance: float) -> NDArray[np.uint8]:
    """Return frames of the first video, of shape (frames, height, width, 3).

    Args:
        source: A seekable file. All of it is read once, to learn when each frame is shown.
        clip: Which frames.
        start_of: Gives the start in seconds, of the film's length and the clip's.
        tolerance: Seconds that a start may lie before the frame that it means.

    Raises:
        DecodeError: There is no such frame, or the clip takes too much memory.
        MissingExtraError: torchcodec is not installed, or cannot find FFmpeg.
        RuntimeError: Or a ValueError: torchcodec cannot read it.
    """
    decoders = _torchcodec()
    _check_kind(source)
    decoder = decoders.VideoDecoder(source, dimension_order="NHWC", seek_mode="exact")
    about = decoder.metadata
    rate, count = about.average_fps, about.num_frames
    if not rate or not count:
        raise DecodeError("the file has no video, or does not say how many frames a second it has")
    wanted = clip.frames or 0
    start = start_of(about.duration_seconds, wanted * clip.every / rate)
    at = about.begin_stream_seconds + start + min(tolerance, 0.5 / rate)

    def frames_from(number: int) -> Any:
        numbers = range(number, min(number + (wanted - 1) * clip.every + 1, count), clip.every)
        _check_size(len(numbers) * about.width * about.height * 3)
        return decoder.get_frames_in_range(numbers.start, numbers.stop, numbers.step)

    # Nearly always a guess is right, and each look costs the decoding of a frame.
    first = min(int((start + min(tolerance, 0.5 / rate)) * rate), count - 1)
    found = frames_from(first)
    shown = float(found.pts_seconds[0]), float(found.duration_seconds[0])
    if not shown[0] <= at < shown[0] + shown[1]:
        right = _shown_at(decoder, at, rate, count)
        if right is None:
            raise DecodeError(f"the video has no frame at {start:g} seconds")
        found = found if right == first else frames_from(right)
    frames = found.data.numpy()
    # A rotation that the file asks for has been applied; clips come without.
    turns = round((getattr(about, "rotation", None) or 0) / 90) % 4
    return np.ascontiguousarray(np.rot90(frames, -turns, (1, 2))) if turns else frames


def _shown_at(decoder: Any, at: float, rate: float, count: int) -> int | None:
    """Return the number of the frame that is shown at a time, the first one before it; None behind the last."""
    low, high = 0, count - 1
    while low <= high:
        number = (low + high) // 2
        frame = decoder.get_frame_at(number)
        if at < frame.pts_seconds:
            high = number - 1
        elif at >= frame.pts_seconds + max(frame.duration_seconds, 1 / rate if number == count - 1 else 0):
            low = number + 1
        else:
            return number
    return max(high, 0) if low < count else None


def sound_samples(source: BinaryIO, clip: Clip, start_of: Start) -> NDArray[np.float32]:
    """Return a part of the first sound, of shape (channels, samples), at the rate that the clip asks for.

    Args:
        source: A seekable file.
        clip: Which part.
        start_of: Gives the start in seconds, of the sound's length and the clip's.

    Raises:
        DecodeError: There is no sound at the start, or the clip takes too much memory.
        MissingExtraError: torchcodec is not installed, or cannot find FFmpeg.
        RuntimeError: Or a ValueError: torchcodec cannot read it.
    """
    decoders = _torchcodec()
    _check_kind(source)
    seconds, rate = clip.seconds or 0.0, clip.rate or 1
    decoder = decoders.AudioDecoder(source, sample_rate=rate)
    about = decoder.metadata
    start = start_of(about.duration_seconds, seconds)
    _check_size(4 * (about.num_channels or 1) * round(seconds * rate))
    at = (about.begin_stream_seconds or 0.0) + start
    try:
        found = decoder.get_samples_played_in_range(at, at + seconds + 2 / rate).data.numpy()
    except RuntimeError as error:
        if about.duration_seconds is None or start < about.duration_seconds:
            raise
        raise DecodeError(f"there is no sound at {start:g} seconds") from error
    if not found.shape[1]:
        raise DecodeError(f"there is no sound at {start:g} seconds")
    return np.ascontiguousarray(found[:, : max(1, round(seconds * rate))])


def _check_kind(source: BinaryIO) -> None:
    """Check that a file shows itself as a film or as sound: behind tags, which FFmpeg skips before it looks."""
    at = 0
    for _ in range(_MOST_TAGS):
        source.seek(at)
        head = source.read(_HEAD_BYTES)
        if head[:3] != b"ID3" or len(head) < 10:
            break
        size = 0
        for byte in head[6:10]:  # seven bits in each (ID3v2.4, section 3.1)
            size = size << 7 | byte & 0x7F
        at += 10 + size + (10 if head[5] & 0x10 else 0)
    source.seek(0)
    kind = sniff_kind(head)
    if kind not in _KINDS or head[:3] == b"ID3":
        raise DecodeError(
            f"torchcodec is given {', '.join(sorted(_KINDS))}, and this is {kind or 'of no kind that is known'}",
            hint="PyAV knows more kinds: leave decoder= away",
        )


def _torchcodec() -> Any:
    try:
        from torchcodec import decoders  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise MissingExtraError(f"torchcodec cannot be imported: {error}", extra="torchcodec") from error
    except (RuntimeError, OSError) as error:  # it is there, and what it stands on is not
        raise MissingExtraError(
            "torchcodec is installed and cannot start: it needs FFmpeg's shared libraries, and the torch that its "
            f"version goes with ({str(error).strip().splitlines()[0]})",
            extra="torchcodec",
            hint="install FFmpeg 4 to 8 with your system's packages, and see the table of versions in its README",
        ) from error
    return decoders
