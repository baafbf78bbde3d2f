"""Iterates TFRecord files with TensorFlow or the `tfrecord` package; `records.py` runs it with their interpreter.

The two cannot be imported into one process: each brings messages of the same names. Answers ``count PATH`` with the
number of records, and ``check PATH`` with the bytes of all of them.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sized


def load(name: str) -> tuple[str, Callable[[str], Iterable[Sized]]]:
    if name == "tfrecord":
        from tfrecord.reader import tfrecord_iterator  # noqa: PLC0415 - only one of them can be there

        return version("tfrecord"), tfrecord_iterator
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf  # noqa: PLC0415

    return tf.__version__, tf.compat.v1.io.tf_record_iterator


def main() -> None:
    release, iterate = load(sys.argv[1])
    print(release, flush=True)
    for line in sys.stdin:
        command, path = line.rstrip("\n").split(" ", 1)
        if command == "check":
            print(sum(map(len, iterate(path))), flush=True)
        else:
            count = 0
            for _ in iterate(path):
                count += 1
            print(count, flush=True)


if __name__ == "__main__":
    main()
