"""Index, random access, exact order and checks for training data in shards: WebDataset tar and TFRecord files."""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any as _Any

    from .dataset.dataset import Dataset, DiscoveredDataset
    from .dataset.opening import discover_dataset, open_dataset
    from .dataset.pairs import PairedDataset, SampleLocation, SamplePair, discover_paired_dataset
    from .dataset.rewriting import upload_caption_metadata
    from .dataset.sample import Sample
    from .dataset.select import Selection, has_field
    from .dataset.views import Buckets, Pack
    from .decoding.clips import Clip
    from .decoding.options import Decode
    from .doctor import check, fix
    from .errors import (
        AccessError,
        ChangedError,
        ChecksumError,
        CompressedShardError,
        DecodeError,
        DuplicateFieldError,
        EncodeError,
        FormatError,
        IndexFileError,
        LimitError,
        MissingExtraError,
        MissingFieldError,
        NoSamplesError,
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
    from .formats.example import (
        decode_tensor,
        encode_example,
        encode_sequence_example,
        parse_example,
        parse_sequence_example,
    )
    from .index.captioning import apply_captions_to_metadata, write_captions_to_metadata
    from .index.members import TarMember, TarMemberIndex, TarPart, TarSample, build_tar_member_index
    from .index.record_reader import iter_records
    from .loading.bucket_loader import BucketDataLoader
    from .loading.cursor import TarDataLoader
    from .loading.loader import Loader
    from .loading.mixing import mix
    from .loading.order import Shuffle
    from .loading.paired import LoadedSamplePair, PairedTarDataLoader
    from .loading.read_ahead import ReadAhead
    from .pipeline.pipeline import DataPipeline
    from .pipeline.web_dataset import WebDataset
    from .pipeline.web_loader import WebLoader
    from .policy import Policy, Report
    from .tasks import index_dataset
    from .webshart.extraction import MetadataExtractor
    from .writing.convert import convert
    from .writing.optimize import optimize_dataset
    from .writing.shard_writer import ShardWriter
    from .writing.tar_writer import TarWriter
    from .writing.tfrecord_writer import TFRecordWriter

__all__ = [
    "AccessError",
    "BucketDataLoader",
    "Buckets",
    "ChangedError",
    "ChecksumError",
    "Clip",
    "CompressedShardError",
    "DataPipeline",
    "Dataset",
    "Decode",
    "DecodeError",
    "DiscoveredDataset",
    "DuplicateFieldError",
    "EncodeError",
    "FormatError",
    "IndexFileError",
    "LimitError",
    "LoadedSamplePair",
    "Loader",
    "MetadataExtractor",
    "MissingExtraError",
    "MissingFieldError",
    "NoSamplesError",
    "NotFoundError",
    "Pack",
    "PairedDataset",
    "PairedTarDataLoader",
    "Policy",
    "RangeIgnoredError",
    "RateLimitedError",
    "ReadAhead",
    "Report",
    "Sample",
    "SampleError",
    "SampleLocation",
    "SamplePair",
    "Selection",
    "ShardWriter",
    "ShardsetError",
    "Shuffle",
    "StateError",
    "StorageError",
    "TFRecordWriter",
    "TarDataLoader",
    "TarMember",
    "TarMemberIndex",
    "TarPart",
    "TarSample",
    "TarWriter",
    "TransferError",
    "TruncatedError",
    "WebDataset",
    "WebLoader",
    "__version__",
    "apply_captions_to_metadata",
    "build_tar_member_index",
    "check",
    "convert",
    "decode_tensor",
    "discover_dataset",
    "discover_paired_dataset",
    "encode_example",
    "encode_sequence_example",
    "fix",
    "has_field",
    "index_dataset",
    "iter_records",
    "mix",
    "open_dataset",
    "optimize_dataset",
    "parse_example",
    "parse_sequence_example",
    "upload_caption_metadata",
    "write_captions_to_metadata",
]

# Where each public name lives. Nothing is imported before it is asked for, so `import shardset` costs nothing.
_HOMES = {
    **dict.fromkeys(("Dataset", "DiscoveredDataset"), ".dataset.dataset"),
    **dict.fromkeys(("discover_dataset", "open_dataset"), ".dataset.opening"),
    **dict.fromkeys(("PairedDataset", "SampleLocation", "SamplePair", "discover_paired_dataset"), ".dataset.pairs"),
    "upload_caption_metadata": ".dataset.rewriting",
    "Sample": ".dataset.sample",
    **dict.fromkeys(("Selection", "has_field"), ".dataset.select"),
    **dict.fromkeys(("Buckets", "Pack"), ".dataset.views"),
    "Clip": ".decoding.clips",
    "Decode": ".decoding.options",
    **dict.fromkeys(("check", "fix"), ".doctor"),
    **dict.fromkeys(
        ("decode_tensor", "encode_example", "encode_sequence_example", "parse_example", "parse_sequence_example"),
        ".formats.example",
    ),
    **dict.fromkeys(("apply_captions_to_metadata", "write_captions_to_metadata"), ".index.captioning"),
    **dict.fromkeys(
        ("TarMember", "TarMemberIndex", "TarPart", "TarSample", "build_tar_member_index"), ".index.members"
    ),
    "iter_records": ".index.record_reader",
    "BucketDataLoader": ".loading.bucket_loader",
    "TarDataLoader": ".loading.cursor",
    "Loader": ".loading.loader",
    "mix": ".loading.mixing",
    "Shuffle": ".loading.order",
    **dict.fromkeys(("LoadedSamplePair", "PairedTarDataLoader"), ".loading.paired"),
    "ReadAhead": ".loading.read_ahead",
    "DataPipeline": ".pipeline.pipeline",
    "WebDataset": ".pipeline.web_dataset",
    "WebLoader": ".pipeline.web_loader",
    **dict.fromkeys(("Policy", "Report"), ".policy"),
    "index_dataset": ".tasks",
    "MetadataExtractor": ".webshart.extraction",
    "convert": ".writing.convert",
    "optimize_dataset": ".writing.optimize",
    "ShardWriter": ".writing.shard_writer",
    "TarWriter": ".writing.tar_writer",
    "TFRecordWriter": ".writing.tfrecord_writer",
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
