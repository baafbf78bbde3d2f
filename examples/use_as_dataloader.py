"""Go through all files of a dataset in batches, stop in the middle, and go on where that was.

Run it so: ``python examples/use_as_dataloader.py SOURCE [--batch-size 4]``.
"""

from __future__ import annotations

import argparse
import json

import shardset


def main() -> None:
    """Read the first batches, keep the state as JSON, and read the rest with a new loader."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder, file, pattern or url of the shards")
    parser.add_argument("--batch-size", type=int, default=4)
    arguments = parser.parse_args()

    loader = shardset.TarDataLoader(arguments.source, batch_size=arguments.batch_size)
    batches = loader.iter_batches()
    print("first batch:")
    for entry in next(batches):
        print(f"  {entry.path}: {entry.size} bytes")

    # What training would keep beside its weights. It holds no credentials.
    state = json.dumps(loader.state_dict())

    resumed = shardset.TarDataLoader.from_state_dict(json.loads(state))
    summary = resumed.get_state_summary()
    print(f"a new loader goes on after {summary['files_processed']} of {summary['total_files']} files")
    count = size = 0
    for batch in resumed.iter_batches():
        count += len(batch)
        size += sum(len(entry.data) for entry in batch)
    print(f"the rest: {count} files, {size} bytes")


if __name__ == "__main__":
    main()
