"""Read some files of a dataset by their numbers, and nothing else of it.

Run it so: ``python examples/read_a_range.py SOURCE 2 6 [--then 10 12]``.
"""

from __future__ import annotations

import argparse

import shardset


def main() -> None:
    """Read files ``[start, stop)``, counted through all shards, and further ranges if any are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder, file, pattern or url of the shards")
    parser.add_argument("start", type=int)
    parser.add_argument("stop", type=int)
    parser.add_argument("--then", type=int, nargs=2, action="append", default=[], metavar=("START", "STOP"))
    arguments = parser.parse_args()

    dataset = shardset.discover_dataset(arguments.source)
    shard_index, file_index = dataset.find_file_location(arguments.start)
    print(f"file {arguments.start} is file {file_index} of shard {shard_index}")

    loader = shardset.TarDataLoader(dataset)
    for entry in loader.iter_range(arguments.start, arguments.stop):
        print(f"  {entry.path}: {len(entry.data)} bytes")

    if arguments.then:
        loader.set_ranges([(start, stop) for start, stop in arguments.then])
        print(f"ranges {arguments.then}:")
        for entry in loader:
            print(f"  {entry.path}: {len(entry.data)} bytes")


if __name__ == "__main__":
    main()
