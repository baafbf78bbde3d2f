"""Tell how large a dataset is and what its captions are, from the indexes alone: no payload is read.

Run it so: ``python examples/dataset_statistics.py SOURCE [--metadata INDEXES]``.
"""

from __future__ import annotations

import argparse

import shardset


def main() -> None:
    """Print the counts of the dataset and of each shard."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder, file, pattern or url of the shards")
    parser.add_argument("--metadata", help="where the indexes are, if not beside the shards")
    arguments = parser.parse_args()

    dataset = shardset.discover_dataset(arguments.source, metadata=arguments.metadata)
    stats = dataset.get_detailed_stats()
    print(f"{stats['total_shards']} shards, {stats['total_files']} files, {stats['total_size']} bytes")
    print(f"{stats['min_files_in_shard']} to {stats['max_files_in_shard']} files in a shard")
    for shard in stats["shard_details"]:
        samples = dataset.get_shard_sample_count(shard["index"])
        print(f"  {shard['name']}: {shard['num_files']} files, {samples} samples, {shard['size_mb']:.2f} MiB")

    layout = dataset.probe_caption_layout()
    print(f"captions: {layout['layout']}, {layout['captioned_samples']} of {layout['samples']} samples in the indexes")


if __name__ == "__main__":
    main()
