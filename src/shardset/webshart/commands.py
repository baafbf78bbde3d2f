"""The functions behind webshart's program, and the program itself: ``webshart = shardset.webshart:main``.

They take the options of a command as attributes, as `argparse` gives them, and print the lines that webshart prints.
``shardset extract-metadata`` and its neighbours do the same work with more to choose from.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn

from .optimize import DEFAULT_PAYLOAD_EXTENSIONS

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Sequence
    from typing import TextIO

_GIB: Final = 1 << 30
_INTERRUPTED: Final = 130


def extract_metadata(args: Namespace) -> None:
    """Write an index for each shard with this namespace's `MetadataExtractor`; print what went wrong, and exit with 1.

    Args:
        args: Has `source`, `destination`, `checkpoint_dir`, `max_workers`, `hf_token`, `range` and
            `include_image_geometry`. A range is text, ``START,END``, half-open; any but the first two may be None.
    """
    from shardset import webshart  # noqa: PLC0415 - whoever replaced the name there means it here too

    extractor = webshart.MetadataExtractor(hf_token=_token(args))
    shard_range = None
    if args.range:
        try:
            shard_range = parse_range(args.range)
        except ValueError as error:
            _fail(f"Error parsing range: {error}")
        _print(f"Processing shards in range [{shard_range[0]}, {shard_range[1]})", sys.stdout)
    try:
        extractor.extract_metadata(
            source=args.source,
            destination=args.destination,
            checkpoint_dir=args.checkpoint_dir,
            max_workers=args.max_workers,
            shard_range=shard_range,
            include_image_geometry=args.include_image_geometry,
        )
    except Exception as error:  # noqa: BLE001 - a program calls this to have it said, not raised
        _fail(f"Error extracting metadata: {error}")
    _print(f"✓ Metadata extraction complete for {args.source}", sys.stdout)


def optimize_captions(args: Namespace) -> None:
    """Write the captions in sidecars into indexes in another folder, and upload these if `push_to_hub` names a place.

    Args:
        args: Has `source`, `destination`, `metadata`, `subfolder`, `hf_token`, `range`, `shard_cache_dir`,
            `shard_cache_gb`, `parallel_downloads`, `push_to_hub`, `path_in_repo` and `revision`.

    Raises:
        ValueError: The range is none.
        As this namespace's `discover_dataset`, `TarDataLoader.coalesce_caption_metadata`, `upload_caption_metadata`.
    """
    from shardset import webshart  # noqa: PLC0415 - as above

    token = _token(args)
    dataset = webshart.discover_dataset(args.source, hf_token=token, subfolder=args.subfolder, metadata=args.metadata)
    if args.shard_cache_dir:
        dataset.enable_shard_cache(
            args.shard_cache_dir, cache_limit_gb=args.shard_cache_gb, parallel_downloads=args.parallel_downloads
        )
    chosen = None
    if args.range:
        start, end = parse_range(args.range)
        chosen = list(range(start, min(end, dataset.num_shards)))
    loader = webshart.TarDataLoader(dataset, load_file_data=False)
    result = loader.coalesce_caption_metadata(destination=args.destination, shard_indices=chosen)
    done = f"Coalesced {result['coalesced_samples']} captions across {result['shards']} shards"
    _print(f"{done} into {args.destination}", sys.stdout)
    if args.push_to_hub:
        commit = webshart.upload_caption_metadata(
            args.destination,
            args.push_to_hub,
            path_in_repo=args.path_in_repo,
            revision=args.revision,
            hf_token=token,
        )
        _print(f"Uploaded caption metadata: {commit}", sys.stdout)


def run_optimize_dataset(args: Namespace) -> None:
    """Pack loose files, or archives without indexes, into indexed shards.

    Args:
        args: Has `source`, `destination`, `push_to_hub`, `source_subfolder`, `output_prefix`, `source_revision`,
            `target_revision`, `hf_token`, `max_shard_size_gb`, `payload_extensions` (text, with commas, or None),
            `no_image_geometry`, `max_shards` and `private`.

    Raises:
        As this namespace's `optimize_dataset`.
    """
    from shardset import webshart  # noqa: PLC0415 - as above

    result = webshart.optimize_dataset(
        args.source,
        destination=args.destination,
        push_to_hub=args.push_to_hub,
        source_subfolder=args.source_subfolder,
        output_prefix=args.output_prefix,
        source_revision=args.source_revision,
        target_revision=args.target_revision,
        hf_token=args.hf_token,
        max_shards=args.max_shards,
        **packing_settings(
            max_shard_size_gb=args.max_shard_size_gb,
            payload_extensions=args.payload_extensions,
            no_image_geometry=args.no_image_geometry,
            private=args.private,
        ),
    )
    samples = f"{result['next_sample_index']}/{result['total_samples'] or '?'} samples"
    this_run = f"created {result['shards_created']} this run; status={result['status']}"
    _print(f"Optimized {samples} into {result['next_shard_index']} shards ({this_run})", sys.stdout)


def main(argv: Sequence[str] | None = None) -> None:
    """Run webshart's program; it exits with 1 after an error, and with 2 after a command line that is none.

    Args:
        argv: The command line behind the program's name; by default that of this process.
    """
    from shardset import webshart  # noqa: PLC0415 - as above

    parser = _parser()
    args = parser.parse_args(argv)
    try:
        if args.command == "extract-metadata":
            webshart.extract_metadata(args)
        elif args.command == "optimize-captions":
            _run(webshart.optimize_captions, args, "optimizing captions")
        elif args.command == "optimize-dataset":
            _run(webshart.run_optimize_dataset, args, "optimizing dataset")
        else:
            parser.print_help()
            sys.exit(1)
    except KeyboardInterrupt:
        _print("✗ Cancelled by user", sys.stderr)
        sys.exit(_INTERRUPTED)


def parse_range(text: str) -> tuple[int, int]:
    """Return the two numbers of ``START,END``, a half-open range.

    Raises:
        ValueError: It is something else, begins below 0, or ends before it begins.
    """
    try:
        start, end = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not START,END") from None
    if not 0 <= start <= end:
        raise ValueError(f"{text!r} begins below 0, or ends before it begins")
    return start, end


def packing_settings(
    *, max_shard_size_gb: float, payload_extensions: str | None, no_image_geometry: bool, private: bool
) -> dict[str, Any]:
    """Return what `optimize_dataset` takes for those options that a command line has in another form."""
    return {
        "max_shard_size_bytes": int(max_shard_size_gb * _GIB),
        "payload_extensions": payload_extensions.split(",") if payload_extensions else DEFAULT_PAYLOAD_EXTENSIONS,
        "include_image_geometry": not no_image_geometry,
        "private": private or None,
    }


def _parser() -> ArgumentParser:
    from argparse import ArgumentParser  # noqa: PLC0415 - nobody else needs it

    parser = ArgumentParser(description="Indexes for WebDataset shards, and captions in them.")
    commands = parser.add_subparsers(dest="command", help="What to do")

    command = commands.add_parser("extract-metadata", help="Write an index for each shard")
    _add_source(command)
    command.add_argument("--destination", required=True, help="Folder for the indexes")
    command.add_argument("--checkpoint-dir", help="Folder for files that say which shards are done")
    command.add_argument("--max-workers", type=int, default=4, help="The most processes to use (default: 4)")
    command.add_argument("--range", metavar="START,END", help="Take only these shards, half-open")
    command.add_argument("--include-image-geometry", action="store_true", help="Read the pixel sizes of images too")

    command = commands.add_parser("optimize-captions", help="Write the captions in sidecars into the indexes")
    _add_source(command)
    command.add_argument("--destination", required=True, help="Folder for the new indexes")
    command.add_argument("--metadata", help="Folder of the indexes as they are")
    command.add_argument("--subfolder", help="Look only below this folder of the source")
    command.add_argument("--range", metavar="START,END", help="Take only these shards, half-open")
    command.add_argument("--shard-cache-dir", help="Cache for shards that are elsewhere")
    command.add_argument("--shard-cache-gb", type=float, default=25.0, help="The most GiB in it (default: 25)")
    command.add_argument("--parallel-downloads", type=int, default=4, help="Shards downloaded at once (default: 4)")
    command.add_argument("--push-to-hub", metavar="REPO_ID", help="Upload the indexes to this dataset repository")
    command.add_argument("--path-in-repo", default="", help="Folder in that repository")
    command.add_argument("--revision", default="main", help="Branch of that repository (default: main)")

    command = commands.add_parser("optimize-dataset", help="Pack loose files, or old archives, into indexed shards")
    _add_source(command)
    command.add_argument("--destination", help="Folder to write to")
    command.add_argument("--push-to-hub", metavar="REPO_ID", help="Dataset repository to upload each shard to")
    command.add_argument("--source-subfolder", "--subfolder", default="", help="Pack only what is below this folder")
    command.add_argument("--output-prefix", default="webshart", help="Folder in the destination (default: webshart)")
    command.add_argument("--source-revision", default="main", help="Branch of a source on the Hub (default: main)")
    command.add_argument("--target-revision", default="main", help="Branch to upload to (default: main)")
    command.add_argument("--max-shard-size-gb", type=float, default=1.0, help="The most GiB in a shard (default: 1)")
    command.add_argument("--payload-extensions", metavar="A,B", help="Suffixes to pack: by default those of media")
    command.add_argument("--no-image-geometry", action="store_true", help="Leave pixel sizes out of the indexes")
    command.add_argument("--max-shards", type=int, help="Stop after so many; run it again to go on")
    command.add_argument("--private", action="store_true", help="Make the repository private, if it is made")
    return parser


def _add_source(command: ArgumentParser) -> None:
    command.add_argument("--source", required=True, help="Folder, or a dataset of the Hub")
    command.add_argument("--hf-token", help="Token for the Hub; by default that in HF_TOKEN")


def _run(command: Callable[[Namespace], None], args: Namespace, doing: str) -> None:
    try:
        command(args)
    except Exception as error:  # noqa: BLE001 - the last place that can say something
        _fail(f"Error {doing}: {error}")


def _fail(message: str) -> NoReturn:
    _print(f"✗ {message}", sys.stderr)
    sys.exit(1)


def _print(text: str, stream: TextIO) -> None:
    """Print a line also where its characters, or those of a file's name, cannot be written: those are spelt out."""
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def _token(args: Namespace) -> str | None:
    return args.hf_token or os.environ.get("HF_TOKEN")
