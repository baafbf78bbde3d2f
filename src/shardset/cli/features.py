"""What commands print of a record of a TFRecord shard: its features, and what is in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardset.errors import DecodeError, FormatError
from shardset.formats.example import is_sequence_example
from shardset.storage.memory import MemoryReader

from .payloads import Look, geometry_document, geometry_text, look_at
from .tables import Column, print_table
from .text import clean, human_size, one_line, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardset.dataset.record_sample import RecordSample

_VALUES_SHOWN: Final = 16
_LONGEST: Final = 200


class ShownFeature(NamedTuple):
    """One feature of a record.

    Attributes:
        name: Its name.
        is_list: It is a feature list of a SequenceExample.
        kind: ``"bytes"``, ``"float"``, ``"int64"``, or None if it has no kind; of a list that of its first step.
        num_values: How many values it has; of a list, steps.
        size: Bytes of its values.
        look: What its first value is, if it is bytes; None otherwise.
        numbers: The first few values, if they are numbers.
    """

    name: str
    is_list: bool
    kind: str | None
    num_values: int
    size: int
    look: Look | None
    numbers: list[float]


class ShownRecord(NamedTuple):
    """A record: what its payload is (``"example"``, ``"sequence_example"`` or None), and its features.

    `look` is what a payload that is neither looks like, and `problem` says why it could not be read. `is_damaged` says
    that it does not have the checksum that is stored.
    """

    form: str | None
    features: list[ShownFeature]
    look: Look | None
    problem: str | None
    is_damaged: bool = False


def show_record(sample: RecordSample) -> ShownRecord:
    """Look at a record and all its features. Damage is shown and not raised.

    Raises:
        StorageError: Reading failed.
    """
    try:
        raw = sample.record
    except FormatError as error:
        return ShownRecord(None, [], None, str(error), is_damaged=True)
    try:
        values = sample.read()
    except DecodeError as error:
        return ShownRecord(None, [], _look(raw), error.message)
    form = "sequence_example" if is_sequence_example(raw) else "example"
    if not values and raw:
        return ShownRecord(None, [], _look(raw), "no feature was found in it")
    return ShownRecord(form, [_show_feature(name, value) for name, value in values.items()], None, None)


def _look(payload: bytes) -> Look:
    return look_at(MemoryReader("", payload, ""), 0, len(payload))


def _show_feature(name: str, value: Any) -> ShownFeature:
    if isinstance(value, list) and any(not isinstance(item, bytes) for item in value):
        first = _show_feature(name, next((step for step in value if step is not None), None))
        size = sum(_show_feature(name, step).size for step in value)
        return first._replace(is_list=True, num_values=len(value), size=size)
    shown = ShownFeature(name, is_list=False, kind=None, num_values=0, size=0, look=None, numbers=[])
    if value is None:
        return shown
    if isinstance(value, np.ndarray):
        kind = "float" if value.dtype.kind == "f" else "int64"
        numbers = value[:_VALUES_SHOWN].tolist()
        return shown._replace(kind=kind, num_values=len(value), size=value.nbytes, numbers=numbers)
    look = _look(value[0]) if value else None
    return shown._replace(kind="bytes", num_values=len(value), size=sum(map(len, value)), look=look)


def feature_document(feature: ShownFeature) -> dict[str, Any]:
    """Return what ``--json`` prints of a feature."""
    look = feature.look
    return {
        "feature": clean(feature.name),
        "is_list": feature.is_list,
        "kind": feature.kind,
        "count": feature.num_values,
        "size": feature.size,
        "content": look and look.kind,
        **geometry_document(look and look.geometry),
        "text": None if look is None or look.text is None else clean(look.text),
        # JSON has neither NaN nor infinities.
        "values": [value if isinstance(value, int) or np.isfinite(value) else str(value) for value in feature.numbers],
    }


_COLUMNS: Final = (
    Column("feature", is_flexible=True),
    Column("kind"),
    Column("values", is_right=True, show="{:,}".format),
    Column("size", is_right=True, show=human_size),
    Column("content", is_flexible=True),
)


def print_features(features: list[ShownFeature]) -> None:
    """Print a table of features."""
    rows = [
        (shown.name, _kind(shown), shown.num_values, shown.size, " ".join(_content(shown)) or None)
        for shown in features
    ]
    print_table(_COLUMNS, rows)


def _kind(shown: ShownFeature) -> str:
    kind = shown.kind or "none"
    return f"list of {kind}" if shown.is_list else kind


def _content(shown: ShownFeature) -> Iterator[str]:
    if shown.numbers:
        texts = [f"{value:.6g}" if type(value) is float else str(value) for value in shown.numbers]
        if shown.num_values > len(texts) or shown.is_list:
            texts.append("...")
        yield shorten(", ".join(texts), _LONGEST)
    look = shown.look
    if look is None:
        return
    if look.text is not None:
        yield shorten(one_line(look.text), _LONGEST)
        return
    yield look.kind
    if look.geometry is not None:
        yield geometry_text(look.geometry)
