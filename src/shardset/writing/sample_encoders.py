"""How the values of a sample become the payloads of its members: by the last part of the field, as webdataset has it.

What is written here is decoded to the value that it was, by `shardset` and, but for what is marked, by webdataset::

    cls cls2 class count index inx id           a whole number, as decimal digits
    txt text transcript html htm                a str, as UTF-8
    json jsn                                    a JSON value; a str or bytes must be JSON text already
    npy                                         an array, without pickled objects
    npz                                         a dict of such arrays, compressed
    ten tenbin tb                               an array, or a list of arrays
    mp msgpack msg                              msgpack
    cbor                                        CBOR
    pth                                         `torch.save`
    pyd pickle pkl                              a pickle (webdataset has no encoder for pkl)
    jpg jpeg jpe jfif img image                 an image, as JPEG of quality 100
    png webp tif tiff bmp jp2 ppm pgm pbm pnm   an image, without loss (webdataset: png tif tiff ppm)
    ANY.gz                                      what ANY gives, compressed by gzip

Bytes of any field, and text of any that does not hold numbers, arrays or images, are payloads already and pass as they
are; in a ``.gz`` field they are compressed unless they are a gzip file. ``pth pyd pickle pkl`` are decoded only where
a reader is told to, because reading those runs code; writing them is safe. webdataset leaves ``class count msgpack
tenbin html htm`` as bytes.
"""

from __future__ import annotations

import io
import json
import operator
import pickle
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from shardset.errors import EncodeError, MissingExtraError
from shardset.formats.tenbin import encode_tenbin

from .image_encoders import IMAGE_SUFFIXES, encode_image

ValueEncoder: TypeAlias = Callable[[Any], bytes]
SampleEncoder: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]
EncoderSpec: TypeAlias = bool | Mapping[str, ValueEncoder] | SampleEncoder | None

_GZIP_MAGIC: Final = b"\x1f\x8b\x08"


def make_encoder(spec: EncoderSpec) -> SampleEncoder | None:
    """Return what turns the values of a sample into bytes; None where they are bytes or text already.

    Args:
        spec: True for the table above, False or None for nothing, a dict of functions by the last part of a field in
            place of the table, or a function that takes a sample and returns one.

    Raises:
        ValueError: It is none of these.
    """
    if spec is True:
        return partial(encode_sample, encoders=ENCODERS)
    if spec is False or spec is None:
        return None
    if isinstance(spec, Mapping):
        return partial(encode_sample, encoders=spec)
    if callable(spec):
        return spec
    raise ValueError(f"encoder={spec!r}: give True, False, a dict of functions, or a function of the sample")


def encode_sample(sample: Mapping[Any, Any], encoders: Mapping[str, ValueEncoder]) -> dict[str, Any]:
    """Return a sample whose values are encoded, those of fields that begin with ``_`` apart.

    Raises:
        EncodeError: A value has no encoding.
    """
    encoded = {}
    for field, value in sample.items():
        if not isinstance(field, str) or (type(value) is bytes and field[-3:] != ".gz") or field[:1] == "_":
            encoded[field] = value
        else:
            encoded[field] = encode_value(value, field, encoders, key=sample.get("__key__"))
    return encoded


def encode_value(
    value: Any, field: str, encoders: Mapping[str, ValueEncoder], *, key: str | None = None
) -> bytes | bytearray | memoryview:
    """Return the payload for the value of a field.

    Args:
        value: The value.
        field: Its field; the last part says how it is encoded, behind an optional ``.gz``.
        encoders: Functions by that part.
        key: Of the sample, for errors.

    Raises:
        EncodeError: The value has no encoding; the message names the field and the type.
        MissingExtraError: A package is missing.
    """
    inner = field.removesuffix(".gz")
    suffix = inner.rpartition(".")[2].lower()
    payload = _encode(value, field, suffix, encoders, key)
    if inner == field:
        return payload
    if isinstance(value, bytes | bytearray | memoryview) and bytes(payload[:3]) == _GZIP_MAGIC:
        return payload
    gzip = zlib.compressobj(9, wbits=31)
    return gzip.compress(payload) + gzip.flush()


def _encode(
    value: Any, field: str, suffix: str, encoders: Mapping[str, ValueEncoder], key: str | None
) -> bytes | bytearray | memoryview:
    if isinstance(value, bytes | bytearray | memoryview):
        return value
    encoder = encoders.get(suffix)
    if isinstance(value, str) and not any(encoder is own for own in _LOOK_AT_TEXT):
        encoder = encode_text
    if encoder is None:
        raise EncodeError(
            f"no encoder for a {type(value).__name__} in the field {field!r}",
            key=key,
            field=field,
            hint=f"give bytes, or an encoder for {suffix!r} (encoder={{...}}), or use a field such as json or npy",
        )
    try:
        return encoder(value)
    except MissingExtraError:
        raise
    except Exception as error:
        reason = str(error) or repr(error)
        raise EncodeError(
            f"the value of {field!r}, a {type(value).__name__}, has no encoding as {suffix}: {reason}",
            key=key,
            field=field,
            hint="give a value that fits the field, bytes as they are to be stored, or use another field",
        ) from error


def encode_number(value: Any) -> bytes:
    """Return a whole number as decimal digits; text is checked to be one."""
    if isinstance(value, str):
        int(value)
        return value.encode("ascii")
    try:
        return b"%d" % operator.index(value)
    except TypeError:
        raise ValueError(f"{value!r} is no whole number") from None


def encode_text(value: Any) -> bytes:
    """Return text as UTF-8."""
    if not isinstance(value, str):
        raise ValueError("it is no str")  # noqa: TRY004 - told with the field
    return value.encode()


def encode_json(value: Any) -> bytes:
    """Return JSON; text is checked to be JSON already. Numbers that are not finite are none."""
    if isinstance(value, str):
        try:
            json.loads(value, parse_constant=_refuse)
        except ValueError as error:
            raise ValueError(f"text is taken for JSON, and this is none ({error}); use txt, or json.dumps it") from None
        return value.encode()
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_to_json)
    try:
        return text.encode()
    except UnicodeEncodeError:  # lone surrogates, which JSON can spell
        return json.dumps(value, allow_nan=False, default=_to_json).encode()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _to_json(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise ValueError(f"a {type(value).__name__} is no JSON value")


def encode_npy(value: Any) -> bytes:
    """Return an array as a .npy file. Arrays of objects are refused: reading them would run code."""
    file = io.BytesIO()
    np.lib.format.write_array(file, _to_array(value), allow_pickle=False)
    return file.getvalue()


def encode_npz(value: Any) -> bytes:
    """Return a dict of arrays as a compressed .npz file, the same bytes each time."""
    if not isinstance(value, Mapping):
        raise ValueError("npz holds a dict of arrays")  # noqa: TRY004 - told with the field
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in value.items():
            if not isinstance(name, str):
                raise ValueError(f"npz names its arrays by str, not by {name!r}")  # noqa: TRY004
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), encode_npy(array), zipfile.ZIP_DEFLATED)
    return file.getvalue()


def encode_ten(value: Any) -> bytes:
    """Return an array, or several, as tenbin."""
    arrays = value if isinstance(value, list | tuple) else [value]
    return encode_tenbin([_to_array(array) for array in arrays])


def _to_array(value: Any) -> np.ndarray[Any, Any]:
    if not hasattr(value, "__array__"):
        raise ValueError("it is no array; make one by numpy.asarray")
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise ValueError("arrays of objects are pickles inside; use another type of elements, or the field pyd")
    return array


def encode_msgpack(value: Any) -> bytes:
    """Return msgpack."""
    try:
        import msgpack  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise MissingExtraError("msgpack is not installed", extra="arrays") from error
    packed: bytes = msgpack.packb(value)
    return packed


def encode_cbor(value: Any) -> bytes:
    """Return CBOR (RFC 8949)."""
    try:
        import cbor2  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise MissingExtraError("cbor2 is not installed", extra="arrays") from error
    encoded: bytes = cbor2.dumps(value)
    return encoded


def encode_torch(value: Any) -> bytes:
    """Return what `torch.save` makes of a value. Reading it back runs code, unless that is limited to weights."""
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise MissingExtraError("torch is not installed", extra="torch") from error
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def encode_pickle(value: Any) -> bytes:
    """Return a pickle. Reading it back runs code, so readers do it only where they are told to."""
    return pickle.dumps(value)


_NUMBERS: Final = ("cls", "cls2", "class", "count", "index", "inx", "id")
ENCODERS: Final[dict[str, ValueEncoder]] = {
    **dict.fromkeys(_NUMBERS, encode_number),
    **dict.fromkeys(("txt", "text", "transcript", "html", "htm"), encode_text),
    **dict.fromkeys(("json", "jsn"), encode_json),
    "npy": encode_npy,
    "npz": encode_npz,
    **dict.fromkeys(("ten", "tenbin", "tb"), encode_ten),
    **dict.fromkeys(("mp", "msgpack", "msg"), encode_msgpack),
    "cbor": encode_cbor,
    "pth": encode_torch,
    **dict.fromkeys(("pyd", "pickle", "pkl"), encode_pickle),
    **{suffix: partial(encode_image, format=suffix) for suffix in IMAGE_SUFFIXES},
}
"""Functions by the last part of a field. What is added here, `TarWriter` and `ShardWriter` use."""

_LOOK_AT_TEXT: Final = tuple({id(own): own for own in ENCODERS.values() if own is not encode_text}.values())
"""Encoders that are given text too, to refuse what would not be decoded. Anywhere else text is a payload already."""
