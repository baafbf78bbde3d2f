"""webdataset's module of this name: handlers of fields, and the decoder of samples.

Where it differs: fields that hold pickles (``pkl pickle pyd pth``) are refused unless a function is named for them, as
in ``decode("pil", wds.handle_extension("pyd", pickle.loads))``. `default_pre_handlers` and `default_post_handlers` may
be changed, for decoders that are made after it; `decoders` may not, and says so.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from shardset.decoding.arrays import decode_cbor as cbor_loads
from shardset.decoding.arrays import decode_msgpack as msgpack_loads
from shardset.decoding.arrays import decode_npy as npy_loads
from shardset.decoding.arrays import decode_npz as npz_loads
from shardset.decoding.handlers import (
    DEFAULT_POST,
    DEFAULT_PRE,
    GUNZIP,
    Continue,
    NamedHandler,
    handle_extension,
    image_handler,
    table_handler,
)
from shardset.decoding.images import IMAGE_SPECS, IMAGE_SUFFIXES
from shardset.decoding.media import torch_audio, torch_video
from shardset.decoding.registry import USUAL
from shardset.decoding.sample_decoder import SampleDecoder
from shardset.errors import DecodeError as DecodingError
from shardset.errors import MissingExtraError
from shardset.formats.tenbin import decode_tenbin as tenbin_loads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = [
    "IMAGE_EXTENSIONS",
    "Continue",
    "Decoder",
    "DecodingError",
    "ImageHandler",
    "basichandlers",
    "call_extension_handler",
    "cbor_loads",
    "decoders",
    "default_decoder",
    "default_post_handlers",
    "default_pre_handlers",
    "gzfilter",
    "handle_extension",
    "imagehandler",
    "imagespecs",
    "msgpack_loads",
    "npy_loads",
    "npz_loads",
    "pytorch_weights_only",
    "tenbin_loads",
    "torch_audio",
    "torch_loads",
    "torch_video",
    "unpickle_loads",
]

pytorch_weights_only = os.environ.get("WDS_PYTORCH_WEIGHTS_ONLY", "0") == "1"
"""Whether `torch_loads` reads nothing but tensors and plain values; so does ``webdataset.pytorch_weights_only``."""

IMAGE_EXTENSIONS = list(IMAGE_SUFFIXES)
imagespecs = dict(IMAGE_SPECS)


def unpickle_loads(data: bytes) -> Any:
    """Return what a pickle holds, for fields that a caller names it for. Reading a pickle runs any code that it names.

    Raises:
        ValueError: ``webdataset.utils.enforce_security`` is set.
    """
    if _flag("shardset.webdataset.utils", "enforce_security"):
        raise ValueError("Unpickling is not allowed for security reasons when enforce_security is set.")
    return pickle.loads(data)  # noqa: S301 - named by the caller


def torch_loads(data: bytes) -> Any:
    """Return what ``torch.save`` wrote, for fields that a caller names it for, with all tensors on the CPU.

    Unless `pytorch_weights_only` is set, it may hold a pickle, and reading that runs any code that it names.

    Raises:
        ValueError: ``webdataset.utils.enforce_security`` is set.
        MissingExtraError: torch is not installed.
    """
    if _flag("shardset.webdataset.utils", "enforce_security"):
        raise ValueError("torch.loads is not allowed for security reasons when enforce_security is set.")
    try:
        import torch  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise MissingExtraError("torch_loads needs torch", extra="torch") from error
    only = pytorch_weights_only or _flag("shardset.webdataset", "pytorch_weights_only")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=only)


def _flag(module: str, name: str) -> bool:
    """Return a flag that programs set on a module, as it is now."""
    return bool(getattr(sys.modules.get(module), name, False))


decoders: Final[Mapping[str, Callable[[bytes], Any]]] = MappingProxyType(
    {**USUAL.table, **dict.fromkeys(("pkl", "pickle", "pyd"), unpickle_loads), "pth": torch_loads}
)
"""Functions by the last part of a field's name, to be called or named by programs. `basichandlers` is not made of them:
it refuses pickles."""

basichandlers = table_handler()
gzfilter = GUNZIP
default_pre_handlers = DEFAULT_PRE
default_post_handlers = DEFAULT_POST


def call_extension_handler(key: str, data: bytes, f: Callable[[bytes], Any], extensions: Iterable[str]) -> Any:
    """Return ``f(data)`` if a name ends in one of the extensions, else None."""
    return handle_extension(" ".join(extensions), f)(key, data)


class ImageHandler(NamedHandler):
    """Decodes images, as a handler of fields.

    Args:
        imagespec: A word from `imagespecs`.
        extensions: The last parts of the names of images.

    Raises:
        ValueError: There is no such word.
    """

    def __init__(self, imagespec: str, extensions: Iterable[str] = tuple(IMAGE_SUFFIXES)) -> None:
        made = image_handler(imagespec, extensions)
        super().__init__(made.find, made.is_final)
        vars(self).update(imagespec=imagespec, extensions=set(extensions))


imagehandler = ImageHandler


class Decoder(SampleDecoder):
    """`SampleDecoder`, with webdataset's names for what it does."""

    def decode1(self, key: str, data: bytes) -> Any:
        """Return the value of one field. Errors come as the handlers raise them."""
        return self.decode_field(key, data)

    def decode(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return a new sample with the values of the fields; the same as calling this object."""
        return self(sample)


default_decoder = Decoder([*default_pre_handlers, *default_post_handlers], pre=[], post=[])
