"""webdataset's module `writer`: `TarWriter`, `ShardWriter`, and the functions that make payloads of values.

The names are those of webdataset 1.0.2. What they do beyond it, or refuse, stands in `shardset.writing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardset.writing.image_encoders import encode_image as imageencoder
from shardset.writing.sample_encoders import ENCODERS as default_handlers  # noqa: N811 - a table that users add to
from shardset.writing.sample_encoders import encode_cbor as cbor_dumps
from shardset.writing.sample_encoders import encode_msgpack as mp_dumps
from shardset.writing.sample_encoders import encode_npy as numpy_dumps
from shardset.writing.sample_encoders import encode_npz as numpy_npz_dumps
from shardset.writing.sample_encoders import encode_sample as encode_based_on_extension
from shardset.writing.sample_encoders import encode_ten as tenbin_dumps
from shardset.writing.sample_encoders import encode_torch as torch_dumps
from shardset.writing.sample_encoders import encode_value
from shardset.writing.sample_encoders import make_encoder as _make_encoder
from shardset.writing.shard_writer import ShardWriter
from shardset.writing.tar_writer import TarWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardset.writing.sample_encoders import EncoderSpec, SampleEncoder, ValueEncoder

__all__ = [
    "ShardWriter",
    "TarWriter",
    "add_handlers",
    "bytestr",
    "cbor_dumps",
    "default_handlers",
    "encode_based_on_extension",
    "encode_based_on_extension1",
    "imageencoder",
    "make_encoder",
    "make_handlers",
    "mp_dumps",
    "numpy_dumps",
    "numpy_npz_dumps",
    "tenbin_dumps",
    "torch_dumps",
]


def make_handlers() -> dict[str, ValueEncoder]:
    """Return a new dict of the functions that values are encoded by, by the last part of a field."""
    return dict(default_handlers)


def add_handlers(d: dict[str, ValueEncoder], keys: str | Iterable[str], value: ValueEncoder) -> None:
    """Put a function into a dict of them, for several last parts of fields: a list, or a str with spaces."""
    d.update(dict.fromkeys(keys.split() if isinstance(keys, str) else keys, value))


def encode_based_on_extension1(data: Any, tname: str, handlers: Mapping[str, ValueEncoder]) -> Any:
    """Return the payload for one value; that of a field that begins with ``_`` stays as it is.

    Raises:
        EncodeError: The value has no encoding.
    """
    return data if tname.startswith("_") else encode_value(data, tname, handlers)


def make_encoder(spec: EncoderSpec) -> SampleEncoder:
    """Return the function of a sample that an encoder specification stands for.

    Raises:
        ValueError: It stands for none.
    """
    return _make_encoder(spec) or (lambda sample: sample)


def bytestr(data: object) -> bytes:
    """Return bytes as they are, and of anything else its text in ASCII.

    Raises:
        UnicodeEncodeError: The text is not ASCII.
    """
    return data if isinstance(data, bytes) else str(data).encode("ascii")
