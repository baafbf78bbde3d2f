"""Index, random access, exact order and checks for training data in shards: WebDataset tar and TFRecord files."""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any as _Any

    from .dataset.dataset import Dataset
    from .dataset.opening import discover_dataset, open_dataset
    from .dataset.sample import Sample
    from .errors import (
        AccessError,
        ChangedError,
        ChecksumError,
        CompressedShardError,
        DecodeError,
        DuplicateFieldError,
        FormatError,
        IndexFileError,
        LimitError,
        MissingExtraError,
        MissingFieldError,
        NotFoundError,
        RangeIgnoredError,
        RateLimitedError,
        SampleError,
        ShardsetError,
        StateError,
        StorageError,
        TransferError,
        TruncatedError,
    )
    from .index.members import TarMember, TarMemberIndex, TarPart, TarSample, build_tar_member_index
    from .loading.cursor import TarDataLoader
    from .policy import Policy, Report
    from .tasks import index_dataset

__all__ = [
    "AccessError",
    "ChangedError",
    "ChecksumError",
    "CompressedShardError",
    "Dataset",
    "DecodeError",
    "DuplicateFieldError",
    "FormatError",
    "IndexFileError",
    "LimitError",
    "MissingExtraError",
    "MissingFieldError",
    "NotFoundError",
    "Policy",
    "RangeIgnoredError",
    "RateLimitedError",
    "Report",
    "Sample",
    "SampleError",
    "ShardsetError",
    "StateError",
    "StorageError",
    "TarDataLoader",
    "TarMember",
    "TarMemberIndex",
    "TarPart",
    "TarSample",
    "TransferError",
    "TruncatedError",
    "__version__",
    "build_tar_member_index",
    "discover_dataset",
    "index_dataset",
    "open_dataset",
]

# Where each public name lives. Nothing is imported before it is asked for, so `import shardset` costs nothing.
_HOMES = {
    "Dataset": ".dataset.dataset",
    **dict.fromkeys(("discover_dataset", "open_dataset"), ".dataset.opening"),
    "Sample": ".dataset.sample",
    **dict.fromkeys(
        ("TarMember", "TarMemberIndex", "TarPart", "TarSample", "build_tar_member_index"), ".index.members"
    ),
    "TarDataLoader": ".loading.cursor",
    **dict.fromkeys(("Policy", "Report"), ".policy"),
    "index_dataset": ".tasks",
}


def __getattr__(name: str) -> _Any:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - takes ten times as long as all the rest

        return version("shardset")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(_HOMES.get(name, ".errors"), __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
