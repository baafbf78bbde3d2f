"""webdataset's names: a program that says ``import shardset.webdataset as wds`` goes on as it is.

Names, arguments and results are those of webdataset 1.0.2; docs/webdataset.md lists every intended difference. Nothing
is imported before it is asked for.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import Any as _Any

from .gopen import gopen as gopen  # now, because the module, once loaded, would take the function's place

pytorch_weights_only = False
"""Whether ``.pth`` fields that somebody asked to be decoded may hold tensors alone."""

_HOMES = {
    "autodecode": (
        "Continue",
        "Decoder",
        "DecodingError",
        "gzfilter",
        "handle_extension",
        "imagehandler",
        "torch_audio",
        "torch_loads",
        "torch_video",
    ),
    "cache": ("LRUCleanup", "pipe_cleaner"),
    "compat": ("FluidInterface", "FluidWrapper", "WebDataset", "WebLoader"),
    "extradatasets": ("MockDataset", "with_epoch", "with_length"),
    "filters": (
        "Cached",
        "LMDBCached",
        "associate",
        "batched",
        "decode",
        "detshuffle",
        "extract_keys",
        "getfirst",
        "info",
        "listed",
        "log_keys",
        "map",
        "map_dict",
        "map_tuple",
        "pipelinefilter",
        "rename",
        "rename_keys",
        "rsample",
        "select",
        "shuffle",
        "slice",
        "to_tuple",
        "transform_with",
        "unbatched",
        "unlisted",
        "xdecode",
    ),
    "gopen": ("gopen_schemes",),
    "handlers": ("ignore_and_continue", "ignore_and_stop", "reraise_exception", "warn_and_continue", "warn_and_stop"),
    "mix": ("RandomMix", "RoundRobin"),
    "pipeline": ("DataPipeline",),
    "shardlists": (
        "DirectoryShardList",
        "MultiShardSample",
        "ResampledShardList",
        "ResampledShards",
        "SimpleShardList",
        "non_empty",
        "resampled",
        "shardspec",
        "single_node_only",
        "split_by_node",
        "split_by_worker",
    ),
    "tariterators": ("tarfile_samples", "tarfile_to_samples"),
    "utils": ("PipelineStage", "repeatedly"),
    "wids": ("ChunkedSampler", "DistributedChunkedSampler", "ShardListDataset", "ShardListSampler"),
    "writer": ("ShardWriter", "TarWriter", "numpy_dumps", "torch_dumps"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = frozenset({*_HOMES, "tenbin"})

__all__ = ["pytorch_weights_only"]
__all__ += sorted({*_MODULE_OF, *_MODULES})  # noqa: PLE0605 - the names by module


def __getattr__(name: str) -> _Any:
    if name in _MODULE_OF:
        value = getattr(_import_module(f".{_MODULE_OF[name]}", __name__), name)
    elif name in _MODULES:
        return _import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
