"""What a command is about: a source of shards, and perhaps one sample in it."""

from __future__ import annotations

import difflib
import os
import sys
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from shlex import quote
from threading import Timer
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow.compute as pc

from shardset.dataset.opening import discover_dataset
from shardset.errors import MissingFieldError, SampleError
from shardset.policy import Policy
from shardset.storage.local import local_path
from shardset.storage.store import url_scheme

from .program import MisuseError, note
from .text import clean, counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.status import Status

    from shardset.dataset.dataset import Dataset
    from shardset.dataset.sample import Sample

_KEYS_COMPARED: Final = 10_000
_SUGGESTIONS: Final = 3
_PATIENCE: Final = 0.5


class Address(NamedTuple):
    """A source, and what stands behind the ``#``, or None."""

    source: str
    fragment: str | None


def split_address(text: str) -> Address:
    """Split ``SOURCE#KEY``. A ``#`` that belongs to the name of something that exists, or to a key, divides nothing."""
    if "#" not in text or _exists(text):
        return Address(text, None)
    places = [at for at, character in enumerate(text) if character == "#"]
    at = next((at for at in reversed(places) if _exists(text[:at])), places[0])
    return Address(text[:at], text[at + 1 :])


def _exists(source: str) -> bool:
    if url_scheme(source) not in {"", "file"}:
        return False
    try:
        return os.path.lexists(local_path(source))
    except ValueError:  # a file url of another machine, or a name with a NUL
        return False


def open_source(source: str) -> Dataset:
    """Open a dataset to look into it: of a damaged shard, what stands before the damage; a remark says so.

    Raises:
        MisuseError: The source is of no kind that is known.
        FormatError: No shard could be read at all; the error is that of the first.
        StorageError: Looking failed.
    """
    try:
        dataset = discover_dataset(source, policy=Policy(on_error="skip"))
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise MisuseError(str(error), "a source is a folder, a shard, a glob, or a pattern in braces") from error
    with _waiting(f"reading the headers of {counted(dataset.num_shards, 'shard')}"):
        catalog = dataset.catalog
    damaged = sum(group.num_damaged for group in catalog.manifest.groups)
    if damaged and not catalog.num_files:
        for shard_index, fault in catalog.faults():
            if fault.is_error:
                raise fault.error(dataset.shard_url(shard_index))
    if damaged:
        are = "is" if damaged == 1 else "are"
        if has_records_alone(dataset):
            note(f"note: {counted(damaged, 'shard')} {are} damaged; see: shardset check {quote(source)}")
        else:
            note(f"note: {counted(damaged, 'shard')} {are} damaged; only what stands before the damage is known")
    return dataset


def is_one_shard(dataset: Dataset, source: str) -> bool:
    """Tell whether a source is a shard itself, and not a folder or a pattern that one shard was found for."""
    return dataset.num_shards == 1 and dataset.shard_url(0) in {source, str(Path(source).absolute())}


def near_path(url: str) -> str:
    """Return the path of a shard as one would type it: from here, if it lies below this folder."""
    here = f"{Path.cwd()}{os.sep}"
    return url.removeprefix(here)


@contextmanager
def _waiting(text: str) -> Iterator[None]:
    """Show that something is going on, where somebody looks, once it has taken a while."""
    if not sys.stderr.isatty():
        yield
        return
    shown: list[Status] = []

    def show() -> None:
        from rich.console import Console

        shown.append(Console(stderr=True, highlight=False).status(text))
        shown[0].start()

    timer = Timer(_PATIENCE, show)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        for status in shown:
            status.stop()


def find_sample(dataset: Dataset, fragment: str) -> Sample:
    """Return the sample that has a key, or else the number, that stands behind a ``#``.

    Raises:
        SampleError: There is no such sample; the hint names keys that are like it.
    """
    # The number of a record is its key, which comes again in every shard; of all of them, samples are numbered.
    number = None if has_records_alone(dataset) else next(dataset.catalog.find(fragment), None)
    if number is None:
        number = sample_number(dataset, fragment)
    if number is None:
        raise no_such_key(dataset, fragment)
    return dataset[number]


def has_records_alone(dataset: Dataset) -> bool:
    """Tell whether all shards of a dataset are TFRecord shards."""
    groups = (dataset.catalog.group(number) for number in range(dataset.catalog.num_groups))
    return all(layout.is_record for group in groups for layout in group.layouts)


def sample_number(dataset: Dataset, text: str) -> int | None:
    """Return the number that a text is, or None if it is none.

    Raises:
        SampleError: There are not as many samples.
    """
    if not (text.isascii() and text.isdigit()):
        return None
    number, count = int(text[:20]), len(dataset)
    if number >= count:
        raise SampleError(
            f"there is no sample {text}, and no such key, in {dataset.name}, which has {counted(count, 'sample')}",
            hint="samples are numbered from 0",
        )
    return number


def no_such_key(dataset: Dataset, key: str) -> MissingFieldError:
    """Return the error for a key that no sample has."""
    near = nearest_keys(dataset, key)
    hint = (
        f"there is {', '.join(map(repr, near))}" if near else f"list the keys with: shardset ls {quote(dataset.name)}"
    )
    return MissingFieldError(f"no sample has the key {key!r}", shard=dataset.name, key=key, hint=hint)


def nearest_keys(dataset: Dataset, wanted: str) -> list[str]:
    """Return a few keys that hold a text, or else are spelled like it (among the first ten thousand)."""
    wanted = clean(wanted)
    if found := list(islice(_keys_with(dataset, wanted), _SUGGESTIONS)):
        return found
    keys = islice((sample.key for sample in dataset), _KEYS_COMPARED)
    return difflib.get_close_matches(wanted, list(keys), _SUGGESTIONS)


def _keys_with(dataset: Dataset, text: str) -> Iterator[str]:
    for number in range(dataset.catalog.num_groups if text else 0):
        group = dataset.catalog.group(number)
        holds = pc.match_substring(group.samples.column("key"), text)
        yield from group.keys_of(pc.indices_nonzero(holds).to_numpy()[:_SUGGESTIONS])
