"""Decoding of the samples of `wids`, whose fields are open files under ``.suffix``.

Nothing in a shard is unpickled: fields that hold pickles (``pkl pickle pt pth``) raise, unless an earlier
transformation has made something of them.
"""

from __future__ import annotations

import gzip
import io
import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardset.errors import DecodeError, LimitError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Sample = dict[str, Any]

IMAGES: Final = frozenset({"jpg", "png", "ppm", "pgm", "pbm", "pnm"})
"""What wids takes for images; it leaves all others as they are."""
_PICKLES: Final = frozenset({"pkl", "pickle", "pt", "pth"})
_MOST_INFLATED: Final = 4 << 30


def default_decoder(sample: Sample, format: str = "PIL", gz_update_key: bool = False) -> Sample:  # noqa: A002 - as in wids
    """Decode what has a known suffix: text, numbers, JSON, arrays, msgpack, and images.

    Args:
        sample: A sample with open files, or bytes, under ``.suffix``; it is left as it is.
        format: ``"PIL"`` for opened Pillow images, ``"numpy"`` for their pixels, uint8 of shape (height, width, ...).
        gz_update_key: Take ``.gz`` off the name of what it is taken off.

    Raises:
        DecodeError: A payload is not what its suffix says, or is a pickle.
        MissingExtraError: A library that a suffix needs is not installed.
        ValueError: The format is unknown.
    """
    if format.lower() not in {"pil", "numpy"}:
        raise ValueError(f"format={format!r} is neither 'PIL' nor 'numpy'")
    result = decode_all_gz(dict(sample), update_key=gz_update_key)
    result = decode_basic(result)
    return decode_images_to_pil(result) if format.lower() == "pil" else decode_images_to_numpy(result)


def decode_all_gz(sample: Sample, format: object = None, update_key: bool = True) -> Sample:  # noqa: A002, ARG001 - as in wids
    """Decompress the fields that end in ``.gz``, in place; one that is called ``.gz`` alone stays.

    Raises:
        DecodeError: A payload is no gzip.
        LimitError: There is more than 4 GiB in it.
    """
    for name, _, value in list(_fields(sample)):
        stem, _, last = name.rpartition(".")
        if last.lower() == "gz" and stem:
            inflated = io.BytesIO(_decode(sample, name, value, _inflate))
            if update_key:
                del sample[name]
            sample[stem if update_key else name] = inflated
    return sample


def decode_basic(sample: Sample, format: object = None) -> Sample:  # noqa: A002, ARG001 - as in wids
    """Decode, in place, what needs no image library.

    ``txt text`` to str, ``cls cls2`` to int, ``json``, ``npy`` to an array, ``mp`` by msgpack, ``safetensors`` to a
    dict of tensors. What was compressed is decoded by the suffix before ``.gz``.

    Raises:
        DecodeError: A payload is not what its suffix says, or is a pickle.
        MissingExtraError: msgpack or safetensors is not installed.
    """
    for name, suffix, value in list(_fields(sample)):
        decode = _BASIC.get(suffix)
        if decode is not None:
            sample[name] = _decode(sample, name, value, decode)
        elif suffix in _PICKLES and (isinstance(value, bytes) or hasattr(value, "read")):
            raise DecodeError(
                f"field {name!r} is a pickle, and whoever wrote it could run any code with it",
                field=name,
                shard=sample.get("__shard__"),
                key=sample.get("__key__"),
                hint="if you trust the shard, unpickle it in a transformation of your own, before the others",
            )
    return sample


def decode_images_to_pil(sample: Sample, format: object = None) -> Sample:  # noqa: A002, ARG001 - as in wids
    """Open images with Pillow, in place; pixels are read when they are asked for.

    Raises:
        DecodeError: A payload is no image.
        MissingExtraError: Pillow is not installed.
    """
    return _decode_images(sample, _open_image)


def decode_images_to_numpy(sample: Sample, format: object = None) -> Sample:  # noqa: A002, ARG001 - as in wids
    """Replace images by their pixels, in place.

    Raises:
        DecodeError: A payload is no image.
        MissingExtraError: Pillow is not installed.
    """
    return _decode_images(sample, lambda payload: np.asarray(_open_image(payload)))


def _decode_images(sample: Sample, decode: Callable[[bytes], Any]) -> Sample:
    for name, suffix, value in list(_fields(sample)):
        if suffix in IMAGES:
            sample[name] = _decode(sample, name, value, decode)
    return sample


def _fields(sample: Sample) -> Iterator[tuple[str, str, Any]]:
    """Yield (name, the suffix that decides, value) of each field."""
    for name, value in sample.items():
        if name.startswith("__"):
            continue
        if not name.startswith("."):
            raise ValueError(f"field {name!r} does not begin with a dot, as all fields of wids do")
        parts = name.lower().split(".")
        yield name, parts[-2] if parts[-1] == "gz" and len(parts) > 2 else parts[-1], value


def _decode(sample: Sample, name: str, value: Any, decode: Callable[[bytes], Any]) -> Any:
    """Decode a field; what an earlier transformation has decoded stays."""
    if not isinstance(value, bytes) and not hasattr(value, "read"):
        return value
    try:
        return decode(value if isinstance(value, bytes) else value.read())
    except (MissingExtraError, LimitError):
        raise
    except Exception as error:
        shard, key = sample.get("__shard__"), sample.get("__key__")
        what = f"field {name!r} of sample {key!r} cannot be decoded: {type(error).__name__}: {error}"
        raise DecodeError(what, field=name, shard=shard, key=key) from error


def _inflate(payload: bytes) -> bytes:
    with gzip.GzipFile(fileobj=io.BytesIO(payload)) as file:
        inflated = file.read(_MOST_INFLATED + 1)
    if len(inflated) > _MOST_INFLATED:
        raise LimitError(f"a gzip of more than {_MOST_INFLATED} bytes")
    return inflated


def _open_image(payload: bytes) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("images are decoded by Pillow, which is not installed", extra="images") from error
    return Image.open(io.BytesIO(payload))


def _unpack(payload: bytes) -> Any:
    try:
        import msgpack  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise MissingExtraError("msgpack is not installed", extra="arrays") from error
    return msgpack.unpackb(payload, raw=False)


def _load_safetensors(payload: bytes) -> Any:
    try:
        from safetensors.torch import load  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415 - may be absent
    except ImportError as error:
        raise MissingExtraError(
            "safetensors or torch is not installed", hint="pip install safetensors torch"
        ) from error
    return load(payload)


_BASIC: Final[dict[str, Callable[[bytes], Any]]] = {
    **dict.fromkeys(("txt", "text"), lambda payload: payload.decode()),
    **dict.fromkeys(("cls", "cls2"), lambda payload: int(payload.decode())),
    "json": json.loads,
    "npy": lambda payload: np.load(io.BytesIO(payload), allow_pickle=False),
    "mp": _unpack,
    "safetensors": _load_safetensors,
}
