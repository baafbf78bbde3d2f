"""Video and sound out of payloads, as arrays: video through PyAV, sound through soundfile, or PyAV where that cannot.

Nothing here is in the table of what is decoded unasked: a short file may be hours of film. It is named for fields, as
in ``decode(wds.torch_video)`` or ``USUAL.extended(dict.fromkeys(VIDEO_SUFFIXES, decode_video))``.
"""

from __future__ import annotations

import io
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardset.errors import DecodeError, MissingExtraError

if TYPE_CHECKING:
    from numpy.typing import NDArray

VIDEO_SUFFIXES: Final = ("mp4", "ogv", "mjpeg", "avi", "mov", "h264", "mpg", "webm", "wmv")
"""Last parts of the names of videos, in lower case, as webdataset has them."""
AUDIO_SUFFIXES: Final = ("flac", "mp3", "sox", "wav", "m4a", "ogg", "wma")
"""Last parts of the names of sound, in lower case, as webdataset has them."""
MAX_DECODED: Final = 8 << 30
"""Bytes that the frames or the sound of one payload may take."""
_SAMPLES_AT_ONCE: Final = 1 << 18

# FFmpeg looks at the bytes to tell what they are, and among what it knows are playlists, which have it open other files
# and addresses: so it is told which formats to know, and that it may open nothing. These are for the container alone:
# with options for streams too, PyAV before 18 reads beyond their end where streams turn up late, as in MPEG.
_OPTIONS: Final = {
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,asf,ogg,flv,mpeg,mpegts,mpegvideo,h264,hevc,m4v,"
    "mjpeg,gif,flac,mp3,wav,aac,aiff,au,w64",
    "protocol_whitelist": "",
}


class Video(NamedTuple):
    """A decoded video.

    Attributes:
        frames: uint8, of shape (frames, height, width, 3), RGB. A rotation that the file asks for is not applied.
        sound: float32, of shape (channels, samples); no channels where there is no sound.
        info: ``video_fps`` (float), if the file says it; ``audio_fps`` (int), its sampling rate, if there is sound.
    """

    frames: NDArray[np.uint8]
    sound: NDArray[np.float32]
    info: dict[str, Any]


def decode_video(payload: bytes) -> Video:
    """Return all frames of the first video of a file, and its first sound.

    Raises:
        DecodeError: It has no frame, they are not all of one size, or they take more than `MAX_DECODED` bytes.
        MissingExtraError: PyAV is not installed.
        ValueError: Or an OSError: FFmpeg cannot read it.
    """
    av = _pyav()
    info: dict[str, Any] = {}
    with av.open(io.BytesIO(payload), container_options=_OPTIONS) as container:
        if not container.streams.video:
            raise DecodeError("the file has no video")
        stream = container.streams.video[0]
        if rate := stream.average_rate or stream.guessed_rate:
            info["video_fps"] = float(rate)
        frames = _frames(container)
    sound = np.empty((0, 0), np.float32)
    # Once more from the start: read in one pass, the sound would be held back, or the frames, as they are interleaved.
    with av.open(io.BytesIO(payload), container_options=_OPTIONS) as container:
        if container.streams.audio:
            sound, info["audio_fps"] = _sound(container)
    return Video(frames, sound, info)


def decode_audio(payload: bytes) -> tuple[NDArray[np.float32], int]:
    """Return sound as (float32 of shape (channels, samples) from -1 to 1, samples a second).

    Raises:
        DecodeError: It is no sound that soundfile or, where installed, PyAV can read, or takes more than `MAX_DECODED`
            bytes.
        MissingExtraError: soundfile is not installed.
    """
    try:
        import soundfile  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except (ImportError, OSError) as error:  # OSError: the library that it stands for is missing
        raise MissingExtraError("sound is decoded by soundfile", extra="audio") from error
    try:
        with soundfile.SoundFile(io.BytesIO(payload)) as file:
            return _read_sound_file(file), int(file.samplerate)
    except soundfile.LibsndfileError as error:
        try:
            av = _pyav()
        except MissingExtraError as missing:
            raise DecodeError(
                f"soundfile cannot read it: {error}",
                hint="PyAV reads m4a, wma and others where it is there: pip install 'shardset[video]'",
            ) from missing
    with av.open(io.BytesIO(payload), container_options=_OPTIONS) as container:
        if not container.streams.audio:
            raise DecodeError("the file has no sound")
        return _sound(container)


def torch_video(key: str, data: bytes) -> tuple[Any, Any, dict[str, Any]] | None:
    """Decode fields that are videos, as a handler.

    Args:
        key: Name of the field with its dot.
        data: Its payload.

    Returns:
        What torchvision's ``read_video`` gave: (frames, sound, info) as `Video` has them, as tensors. None for a field
        that is no video by its name.

    Raises:
        DecodeError: As `decode_video`; so all else.
        MissingExtraError: PyAV or torch is not installed.
    """
    if key.rpartition(".")[2].lower() not in VIDEO_SUFFIXES:
        return None
    torch = _torch()
    frames, sound, info = decode_video(data)
    return torch.from_numpy(frames), torch.from_numpy(sound), info


def torch_audio(key: str, data: bytes) -> tuple[Any, int] | None:
    """Decode fields that are sound, as a handler.

    Args:
        key: Name of the field with its dot.
        data: Its payload.

    Returns:
        What torchaudio's ``load`` gave: (float32 tensor of shape (channels, samples), samples a second). None for a
        field that is no sound by its name.

    Raises:
        DecodeError: As `decode_audio`.
        MissingExtraError: soundfile or torch is not installed.
    """
    if key.rpartition(".")[2].lower() not in AUDIO_SUFFIXES:
        return None
    torch = _torch()
    samples, rate = decode_audio(data)
    return torch.from_numpy(samples), rate


def _frames(container: Any) -> NDArray[np.uint8]:
    frames: list[NDArray[np.uint8]] = []
    size = 0
    for frame in container.decode(video=0):
        size += frame.width * frame.height * 3
        _check_size(size)
        frames.append(frame.to_ndarray(format="rgb24"))
    if not frames:
        raise DecodeError("the video has no frame")
    if any(frame.shape != frames[0].shape for frame in frames):
        raise DecodeError("the frames of the video are not all of one size")
    return np.stack(frames)


def _read_sound_file(file: Any) -> NDArray[np.float32]:
    """Return float32 of shape (channels, samples). The length that the header says is not relied on."""
    pieces = [np.empty((0, file.channels), np.float32)]
    size = 0
    while len(piece := file.read(_SAMPLES_AT_ONCE, dtype="float32", always_2d=True)):
        size += piece.nbytes
        _check_size(size)
        pieces.append(piece)
    return np.ascontiguousarray(np.concatenate(pieces).T)


def _sound(container: Any) -> tuple[NDArray[np.float32], int]:
    """Return (float32 of shape (channels, samples), samples a second) of the first sound of a file."""
    pieces: list[NDArray[np.float32]] = []
    stream = container.streams.audio[0]
    resampler = _pyav().AudioResampler(format="fltp")
    size = 0
    for frame in chain(container.decode(audio=0), (None,)):  # None has the resampler give what it still holds
        for part in resampler.resample(frame):
            piece = part.to_ndarray()
            size += piece.nbytes
            _check_size(size)
            pieces.append(piece)
    if not pieces:
        return np.empty((stream.codec_context.channels, 0), np.float32), int(stream.codec_context.sample_rate)
    return np.concatenate(pieces, axis=1), int(stream.codec_context.sample_rate)


def _check_size(size: int) -> None:
    if size > MAX_DECODED:
        raise DecodeError(f"it decodes to more than {MAX_DECODED} bytes")


def _pyav() -> Any:
    try:
        import av
    except ImportError as error:
        raise MissingExtraError("video is decoded by PyAV", extra="video") from error
    return av


def _torch() -> Any:
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise MissingExtraError("tensors need torch", extra="torch") from error
    return torch
