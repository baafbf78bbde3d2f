"""A part of a film or of sound, read and decoded alone: of a long file, little more than the part is touched."""

from __future__ import annotations

import io
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, NamedTuple

import numpy as np

from shardset.errors import DecodeError, MissingExtraError

from .media import _OPTIONS, _check_size, _pyav
from .shaping import draws
from .torchcodec_clips import film_frames, sound_samples

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_MARGIN: Final = 0.25
"""Seconds of sound that are read before a clip, for the decoder, and behind it, for the filter of a resampler."""
_TOLERANCE: Final = 0.001
"""Seconds that a start may lie before a frame that it means: files round times, the coarsest to this."""


@dataclass(frozen=True, slots=True)
class Clip:
    """A part of a film, as frames, or of sound, as seconds.

    Attributes:
        frames: How many frames of the first video are wanted: uint8 of shape (frames, height, width, 3), RGB. A
            rotation that the file asks for is not applied.
        seconds: How long a part of the first sound is wanted: float32 from -1 to 1, of shape (channels, samples).
        start: Where the clip begins, in seconds from the beginning: with the frame that is shown then, or with the
            sample at that time. ``"random"``: anywhere that it fits, as the seed of the sample decides.
        every: Only each so-manieth frame is wanted, the first of them at the start.
        rate: Samples a second that sound comes out with; what has another rate is resampled by PyAV.
        decoder: ``"pyav"``: PyAV, and for sound soundfile where that can read it. ``"torchcodec"``: torchcodec, which
            needs torch and the system's FFmpeg. It gives the same frames, but for rounding in their colours, and reads
            a film once as a whole to find them; it knows fewer kinds of files.

    A clip is shorter than asked where the file ends; nothing is added.

    Raises:
        ValueError: Not exactly one of `frames` and `seconds` is given, `rate` does not go with `seconds`, a number is
            not positive, or there is no such decoder.
    """

    frames: int | None = None
    seconds: float | None = None
    start: float | Literal["random"] = 0.0
    every: int = 1
    rate: int | None = None
    decoder: Literal["pyav", "torchcodec"] = "pyav"

    def __post_init__(self) -> None:
        if (self.frames is None) == (self.seconds is None):
            raise ValueError("a clip is of frames (video) or of seconds (sound): give one of both")
        if (self.rate is None) != (self.seconds is None):
            raise ValueError("rate=: seconds of sound need one, so that all clips have the same, and frames have none")
        for name, least in (("frames", 1), ("every", 1), ("rate", 1)):
            number = getattr(self, name)
            if number is not None and not (type(number) is int and number >= least):
                raise ValueError(f"{name}={number!r}: it is a whole number, at least {least}")
        if self.seconds is not None and not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds={self.seconds!r}: it is a number of seconds, above 0")
        start: object = self.start
        if start != "random" and not (isinstance(start, int | float) and 0 <= start < float("inf")):
            raise ValueError(f"start={self.start!r}: it is a number of seconds, or 'random'")
        if self.decoder not in {"pyav", "torchcodec"}:
            raise ValueError(f"decoder={self.decoder!r}: it is 'pyav' or 'torchcodec'")


def decode_clip(source: bytes | bytearray | memoryview | BinaryIO, clip: Clip, seed: int = 0) -> NDArray[Any]:
    """Return a part of a film or of sound.

    Args:
        source: A whole file, or a seekable one that is open for reading.
        clip: Which part.
        seed: Decides where it begins, if that is random.

    Raises:
        DecodeError: There is no video or no sound in it, or none at the start of the clip; its length, which a random
            start needs, is unknown; or the clip takes more than `media.MAX_DECODED` bytes.
        MissingExtraError: PyAV is not installed, or soundfile or torchcodec, where it is needed.
        ValueError: Or an OSError, or torchcodec's RuntimeError: FFmpeg cannot read it.
    """
    file = io.BytesIO(source) if isinstance(source, bytes | bytearray | memoryview) else source
    if clip.decoder == "torchcodec":

        def start_of(duration: float | None, taken: float) -> float:
            return _start(clip, duration, taken, seed)

        if clip.frames is not None:
            return film_frames(file, clip, start_of, tolerance=_TOLERANCE)
        return sound_samples(file, clip, start_of)
    return _frames(file, clip, seed) if clip.frames is not None else _sound(file, clip, seed)


def _start(clip: Clip, duration: float | None, taken: float, seed: int) -> float:
    """Return where a clip begins, in seconds."""
    if clip.start != "random":
        return float(clip.start)
    if duration is None:
        raise DecodeError("the file does not say how long it is, which a random start needs")
    return max(0.0, duration - taken) * draws(seed)[0]


# --- video -----------------------------------------------------------------------------------------------------------


def _frames(file: BinaryIO, clip: Clip, seed: int) -> NDArray[np.uint8]:
    with _pyav().open(file, container_options=_OPTIONS) as container:
        if not container.streams.video:
            raise DecodeError("the file has no video")
        stream = container.streams.video[0]
        rate = stream.average_rate or stream.guessed_rate
        taken = (clip.frames or 0) * clip.every / rate if rate else Fraction(0)
        start = _start(clip, _duration(container, stream), float(taken), seed)
        found: list[NDArray[np.uint8]] = []
        size = 0
        for number, frame in enumerate(_from(container, stream, start, rate)):
            if number % clip.every:
                continue
            size += frame.width * frame.height * 3
            _check_size(size)
            found.append(frame.to_ndarray(format="rgb24"))
            if len(found) == clip.frames:
                break
    if not found:
        raise DecodeError(f"the video has no frame at {start:g} seconds")
    if any(frame.shape != found[0].shape for frame in found):
        raise DecodeError("the frames of the video are not all of one size")
    return np.stack(found)


def _duration(container: Any, stream: Any) -> float | None:
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    return None if container.duration is None else container.duration / 1_000_000


def _from(container: Any, stream: Any, start: float, rate: Fraction | None) -> Iterator[Any]:
    """Give the frame that is shown `start` seconds after the first one, and those that follow it."""
    origin = stream.start_time
    if start > 0 and origin is not None and _seek(container, stream, origin + int(start / stream.time_base)):
        frames = container.decode(stream)
        first = next(frames, None)
        if first is not None and first.pts is not None and _is_by(first, start, origin):
            yield from _since(first, frames, start, origin, rate)
            return
        _seek(container, stream, origin)  # it went too far: the file's table of key frames is wrong, or there is none
    frames = container.decode(stream)
    first = next(frames, None)
    if first is None:
        return
    if first.pts is not None:
        yield from _since(first, frames, start, first.pts if origin is None else origin, rate)
        return
    if rate is None and start > 0:
        raise DecodeError("the video does not say how many frames a second it has, which a start needs")
    # A bare stream tells no times: its frames are counted.
    skipped = 0 if rate is None else int((start + _TOLERANCE) * rate)
    yield from islice(chain((first,), frames), skipped, None)


def _seek(container: Any, stream: Any, pts: int) -> bool:
    """Go to the last key frame at or before a time, and tell whether the file lets itself be sought in."""
    try:
        container.seek(pts, stream=stream)
    except _pyav().FFmpegError:
        return False
    return True


def _is_by(frame: Any, start: float, origin: int) -> bool:
    """Tell whether a frame is shown by the time that a clip starts; times in a file are rounded to its ticks."""
    return bool((frame.pts - origin) * frame.time_base <= start + min(_TOLERANCE, float(frame.time_base)))


def _since(held: Any, frames: Iterator[Any], start: float, origin: int, rate: Fraction | None) -> Iterator[Any]:
    """Give the last of some frames that is shown by the start, and those after it."""
    for frame in frames:
        if frame.pts is None or _is_by(frame, start, origin):
            held = frame
            continue
        yield held
        yield frame
        yield from frames
        return
    shown = float((held.pts - origin) * held.time_base) if held.pts is not None else start
    lasts = float(held.duration * held.time_base) if held.duration else float(1 / rate) if rate else None
    if lasts is None or start < shown + lasts:
        yield held


# --- sound -----------------------------------------------------------------------------------------------------------


class _Span(NamedTuple):
    """A part of sound, as samples of the file; `end` without what is read for the resampler alone."""

    start: int
    end: int
    margin: int


def _sound(file: BinaryIO, clip: Clip, seed: int) -> NDArray[np.float32]:
    try:
        import soundfile  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except (ImportError, OSError) as error:  # OSError: the library that it stands for is missing
        raise MissingExtraError("sound is decoded by soundfile", extra="audio") from error
    try:
        with soundfile.SoundFile(file) as sound:
            rate = int(sound.samplerate)
            span = _span(clip, rate, sound.frames / rate if sound.frames > 0 else None, seed)
            sound.seek(min(span.start, sound.frames))
            samples = sound.read(span.end + span.margin - span.start, dtype="float32", always_2d=True).T
    except soundfile.LibsndfileError as error:
        file.seek(0)
        try:
            samples, rate, span = _sound_of_film(file, clip, seed)
        except MissingExtraError as missing:
            raise DecodeError(
                f"soundfile cannot read it: {error}",
                hint="PyAV reads m4a, wma and others where it is there: pip install 'shardset[video]'",
            ) from missing
    if not samples.shape[1]:
        raise DecodeError(f"there is no sound at {span.start / rate:g} seconds")
    wanted = min(span.end - span.start, samples.shape[1])
    if rate == clip.rate:
        return np.ascontiguousarray(samples[:, :wanted])
    return _resampled(samples, rate, clip.rate or rate)[:, : round(wanted * (clip.rate or rate) / rate)]


def _span(clip: Clip, rate: int, duration: float | None, seed: int) -> _Span:
    seconds = clip.seconds or 0.0
    start = round(_start(clip, duration, seconds, seed) * rate)
    _check_size(4 * round(seconds * max(rate, clip.rate or 0)))
    return _Span(start, start + max(1, round(seconds * rate)), 0 if rate == clip.rate else int(_MARGIN * rate))


def _sound_of_film(file: BinaryIO, clip: Clip, seed: int) -> tuple[NDArray[np.float32], int, _Span]:
    """Return samples of a part of the first sound of a file that FFmpeg reads, their rate, and which part it is."""
    av = _pyav()
    with av.open(file, container_options=_OPTIONS) as container:
        if not container.streams.audio:
            raise DecodeError("the file has no sound")
        stream = container.streams.audio[0]
        rate = int(stream.codec_context.sample_rate)
        span = _span(clip, rate, _duration(container, stream), seed)
        origin = stream.start_time or 0
        early = max(0, span.start - int(_MARGIN * rate))  # a decoder comes right after some frames only
        if early:
            _seek(container, stream, origin + int(Fraction(early, rate) / stream.time_base))
        resampler = av.AudioResampler(format="fltp")
        pieces = [np.empty((stream.codec_context.channels, 0), np.float32)]
        at, end = 0, span.end + span.margin
        for frame in container.decode(stream):
            if frame.pts is not None:
                at = round((frame.pts - origin) * frame.time_base * rate)
            for part in resampler.resample(frame):
                piece = part.to_ndarray()
                pieces.append(piece[:, max(0, span.start - at) : max(0, end - at)])
                at += piece.shape[1]
            if at >= end:
                break
    return np.concatenate(pieces, axis=1), rate, span


def _resampled(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """Return sound at another rate. Each channel goes alone, so that their number does not matter."""
    try:
        av = _pyav()
    except MissingExtraError as error:
        raise MissingExtraError(f"sound of {rate} samples a second is resampled by PyAV", extra="video") from error
    channels: list[NDArray[np.float32]] = []
    for samples_of_one in np.ascontiguousarray(samples):
        frame = av.AudioFrame.from_ndarray(samples_of_one[np.newaxis], format="fltp", layout="mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler(format="fltp", layout="mono", rate=wanted)
        parts = [part for each in (frame, None) for part in resampler.resample(each)]
        channels.append(np.concatenate([part.to_ndarray()[0] for part in parts]))
    return np.stack(channels)
