"""``shardset cat``: one payload to standard output."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Final

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardset.dataset.record_sample import RecordSample
from shardset.errors import LimitError, MissingFieldError, SampleError, without_secrets
from shardset.formats.naming import base_plus_ext

from .address import has_records_alone, no_such_key, open_source, sample_number, split_address
from .program import Command, MisuseError
from .text import counted, printable

if TYPE_CHECKING:
    from shardset.dataset.dataset import Dataset

_CHUNK: Final = 1 << 20
_MOST_AT_TERMINAL: Final = 4 << 20


@click.command(
    "cat",
    cls=Command,
    examples=[
        ("shardset cat photos.tar#0007.jpg > 0007.jpg", "the field jpg of the sample with the key 0007"),
        ("shardset cat photos/#7.json | jq .caption", "the field json of the eighth sample of a folder of shards"),
        ("shardset cat train.tfrecord#7.image/encoded > 7.jpg", "a feature of a record; without its name, all of it"),
        ("shardset cat photos.tar#__meta__/origin.txt", "a file that belongs to no sample, by its whole name"),
    ],
)
@click.argument("address", metavar="SOURCE#KEY.FIELD")
@click.option("-f", "--force", is_flag=True, help="Print binary data to a terminal too.")
def command(address: str, *, force: bool) -> None:
    """Write one payload to standard output, byte for byte.

    KEY is the key of a sample or, if no sample has it, a sample's number. FIELD is the suffix, in any case; of a record
    of a TFRecord shard, the name of a feature, whose numbers are printed a line each.
    """
    source, fragment = split_address(address)
    if not fragment:
        raise MisuseError(f"{without_secrets(address)} names no payload", "shardset cat SOURCE#KEY.FIELD")
    payload = find_payload(open_source(source), fragment)
    if sys.stdout.isatty() and not force and not is_plain_text(payload):
        raise MisuseError(
            f"{counted(len(payload), 'byte')} that are no plain text would garble the terminal",
            "send them to a file (> NAME), or use --force",
        )
    output = sys.stdout.buffer
    for at in range(0, len(payload), _CHUNK):
        output.write(payload[at : at + _CHUNK])
    output.flush()


def find_payload(dataset: Dataset, name: str) -> memoryview:
    """Return the payload that a member's name, or a sample's number and a field, names.

    Raises:
        SampleError: There is none, or the name is that of a sample as a whole.
        StorageError: Reading failed.
    """
    record = find_record(dataset, name)
    if record is not None:
        return record
    split = base_plus_ext(name.encode("utf-8", "surrogateescape"))
    key, field = (part.decode("utf-8", "surrogateescape") for part in split or (b"", b""))
    field = field.lower()
    samples = [dataset[number] for number in dataset.catalog.find(key)] if split else []
    for sample in samples:  # a key that comes twice may have the field in one of both places
        if field in sample:
            return sample.view(field)
    other = _find_other(dataset, name)
    if other is not None:
        return other
    if samples:
        return samples[0].view(field)  # which raises, and says what there is
    number = next(dataset.catalog.find(name), None)
    if number is None:
        number = sample_number(dataset, key if split else name)
    if number is None:
        raise no_such_key(dataset, key if split else name)
    sample = dataset[number]
    if split and sample.key != name:
        return sample.view(field)
    raise MissingFieldError(
        f"{name!r} is a sample and not one payload",
        shard=sample.shard,
        key=sample.key,
        hint=f"name one of {', '.join(f'{name}.{field}' for field in sample)}",
    )


_RECORD: Final = re.compile(r"([0-9]{1,18})(?:\.(.*))?", re.DOTALL)


def find_record(dataset: Dataset, name: str) -> memoryview | None:
    """Return the payload of the record, or the value of the feature of one, that a name is; None if it is none.

    Numbers are given as text, a line each.

    Raises:
        SampleError: There is no such record or feature, or it is a list of several byte strings.
    """
    match = _RECORD.fullmatch(name)
    if match is None or not has_records_alone(dataset):
        return None
    number = sample_number(dataset, match[1])
    sample = dataset[number or 0]
    if not isinstance(sample, RecordSample):
        return None
    if match[2] is None:
        return memoryview(sample.record)
    value = sample[match[2]]
    if isinstance(value, np.ndarray):
        return memoryview("".join(f"{item}\n" for item in value.tolist()).encode())
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], bytes):
        what = "has no kind" if value is None else f"is {counted(len(value), 'value')} and not one"
        raise SampleError(
            f"feature {match[2]!r} of record {sample.key} {what}",
            shard=sample.shard,
            key=sample.key,
            hint="print the record as a whole, or see it with: shardset show",
        )
    return memoryview(value[0])


def _find_other(dataset: Dataset, name: str) -> memoryview | None:
    """Return the payload of a file that belongs to no sample, or None if there is none of that name."""
    raw = name.encode("utf-8", "surrogateescape")
    for number, first_shard in enumerate(dataset.catalog.shard_starts[:-1]):
        others = dataset.catalog.group(number).others
        is_named = pc.equal(others.column("name").cast(pa.binary()), raw).to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(is_named).tolist():
            shard, offset, length = (others.column(label)[row].as_py() for label in ("shard", "offset", "length"))
            reader = dataset.reader(first_shard + shard)
            if offset < 0:
                raise LimitError(
                    f"{name!r} is a sparse file of no sample, which does not stand in one piece",
                    shard=reader.url,
                    code="sparse_member",
                    member=name,
                    hint=f"extract it with: tar -xf {reader.url}",
                )
            return reader.view(offset, length)
    return None


def is_plain_text(payload: memoryview) -> bool:
    """Tell whether a terminal can be given a payload: text without control characters, and not too much of it."""
    if len(payload) > _MOST_AT_TERMINAL:
        return False
    try:
        text = str(payload, "utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        return False
    lines = text.replace("\r\n", "\n").replace("\t", " ").split("\n")
    return all(line == printable(line) for line in lines)
