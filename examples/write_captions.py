"""Write captions into the index of a shard, and rename the field in all indexes of a dataset.

Run it so: ``python examples/write_captions.py SOURCE CAPTIONS.json [--rename captions_v1]``.

CAPTIONS.json is an object: a name of a file, or its part before the suffix, and its caption or captions. The shards are
not touched; their indexes are replaced, each as a whole.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import shardset


def main() -> None:
    """Write the captions, show what a sample has then, and rename the field if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder of the shards and their indexes")
    parser.add_argument("captions", type=Path, help="a JSON file")
    parser.add_argument("--rename", metavar="NAME", help="what to call the field afterwards")
    arguments = parser.parse_args()

    captions = json.loads(arguments.captions.read_text(encoding="utf-8"))
    dataset = shardset.discover_dataset(arguments.source)
    for shard_index in range(dataset.num_shards):
        info = dataset.get_shard_info(shard_index)
        count = shardset.write_captions_to_metadata(info["json_path"], captions)
        print(f"{info['name']}: {count} entries")

    if arguments.rename:
        renamed = dataset.field_rename("captions", arguments.rename, overwrite=True)
        print(f"renamed in {renamed} entries")

    loader = shardset.TarDataLoader(arguments.source)
    entry = loader.load_sample(0, 0)
    print(f"{entry.path}: {entry.metadata.get(arguments.rename or 'captions')!r}")


if __name__ == "__main__":
    main()
