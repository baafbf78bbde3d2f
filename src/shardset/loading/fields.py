"""Which fields of samples are loaded, and what they are called in batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardset.dataset.record_sample import RECORD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardset.index.catalog import Layout


class RecordFields(NamedTuple):
    """What is read of records.

    Attributes:
        names: For each name in a batch the parts of a record that it may be, the first that is there being taken; None
            for all features, under their own names.
        required: The parts that each record must have; None for all features.
        optional: Those that it may have. With `RECORD` among them, a record that is no Example does too.
    """

    names: Mapping[str, tuple[str, ...]] | None
    required: tuple[str, ...] | None
    optional: tuple[str, ...]

    @property
    def is_payload(self) -> bool:
        """Whether records are wanted as a whole alone, so that nothing is parsed."""
        return self.required == (RECORD,) and not self.optional


@dataclass(frozen=True, slots=True)
class Fields:
    """Which fields of samples are wanted, and what they are called in batches.

    Attributes:
        names: For each name in a batch the fields that it may be, the first that is there being taken; None for all
            fields, under their own names.
    """

    names: Mapping[str, tuple[str, ...]] | None

    @property
    def is_plain(self) -> bool:
        """Whether each field has one name, its own."""
        return self.names is None or all(choices == (name,) for name, choices in self.names.items())

    def of_records(self) -> RecordFields:
        """Return which parts of records are read."""
        if self.names is None:
            return RecordFields(None, None, ())
        # Each record has itself, so that what comes behind is not looked for.
        choices = {
            name: given[: given.index(RECORD) + 1] if RECORD in given else given for name, given in self.names.items()
        }
        single = [given[0] for given in choices.values() if len(given) == 1]
        several = [each for given in choices.values() if len(given) > 1 for each in given]
        if all(RECORD in given for given in choices.values()):
            single = [each for each in single if each != RECORD or not several]
        elif RECORD in several:
            several = [each for each in several if each != RECORD]
            single.append(RECORD)
        return RecordFields(choices, tuple(dict.fromkeys(single)), tuple(dict.fromkeys(several)))

    def kind_of(self, name: str) -> str:
        """Return the field that a name in the batch is decoded like: the first of its alternatives."""
        return name if self.names is None else self.names.get(name, (name,))[0]

    def of_layout(self, layout: Layout) -> dict[str, str]:
        """Return, for samples of a layout, the field behind each name."""
        if self.names is None:
            return {name: name for name in layout.fields}
        return {
            name: next((choice for choice in choices if choice in layout.positions), choices[0])
            for name, choices in self.names.items()
        }


def parse_fields(fields: Sequence[str] | Mapping[str, str] | str | None) -> Fields:
    """Read what a user says of fields.

    Args:
        fields: Names of fields; or for each name in the batch the field; alternatives separated by ``;``, under the
            name of the first. None for all.

    Raises:
        ValueError: A name is empty, or occurs twice, or begins with two underscores and is not `RECORD`, or there is
            none.
        TypeError: A name is no text.
    """
    if fields is None:
        return Fields(None)
    names: dict[str, tuple[str, ...]] = {}
    listed = [fields] if isinstance(fields, str) else fields
    pairs = [(name, fields[name]) for name in fields] if isinstance(fields, dict) else [(None, each) for each in listed]
    for given, spec in pairs:
        if not isinstance(spec, str):
            raise TypeError(f"a field is named by a text, not {spec!r}")
        choices = tuple(choice.strip() for choice in spec.split(";"))
        name = choices[0] if given is None else given
        if not all(choices) or not name:
            raise ValueError(f"an empty name of a field: {spec!r}")
        if name.startswith("__") and (name != RECORD or RECORD not in choices):
            raise ValueError(f"{name!r}: names that begin with two underscores are for what batches say of themselves")
        if name in names:
            raise ValueError(f"field {name!r} is named twice")
        names[name] = choices
    if not names:
        raise ValueError("no field is named; None stands for all of them")
    return Fields(names)
