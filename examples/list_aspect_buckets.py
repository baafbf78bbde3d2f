"""Sort the images of a dataset into buckets of one shape, and load one image of each.

Run it so: ``python examples/list_aspect_buckets.py SOURCE [--pixels 1048576]``.

The indexes must hold the sizes of the images: ``shardset index SOURCE --geometry`` puts them there.
"""

from __future__ import annotations

import argparse

import shardset


def main() -> None:
    """List the buckets of each shard, then go through all of them in batches of one shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder, file, pattern or url of the shards")
    parser.add_argument("--pixels", type=int, default=1024**2, help="area that images are scaled to")
    arguments = parser.parse_args()

    dataset = shardset.discover_dataset(arguments.source)
    loader = shardset.TarDataLoader(dataset)
    for shard in loader.list_shard_sample_aspect_buckets(
        range(dataset.num_shards), key="geometry-tuple", target_pixel_area=arguments.pixels
    ):
        print(shard["shard_name"])
        for key, items in shard["buckets"].items():
            item = items[0]
            entry = loader.load_sample(shard["shard_idx"], item["sample_idx"])
            virtual_id = f"webshart://{shard['shard_idx']}/{item['sample_idx']}/{item['filename']}"
            print(f"  {key}: {len(items)} images, the first {virtual_id} of {len(entry.data)} bytes")

    batches = shardset.BucketDataLoader(
        dataset, key="geometry-tuple", target_pixel_area=arguments.pixels, batch_size=2, seed=1
    )
    print("batches of one shape:")
    for batch in batches.iter_batches():
        print(f"  {batches.get_current_bucket()}: {', '.join(entry.path for entry in batch)}")


if __name__ == "__main__":
    main()
