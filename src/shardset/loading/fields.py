"""Which fields of samples are loaded, and what they are called in batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardset.index.catalog import Layout


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
        ValueError: A name is empty, or occurs twice, or begins with two underscores, or there is none.
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
        if name.startswith("__"):
            raise ValueError(f"{name!r}: names that begin with two underscores are for what batches say of themselves")
        if name in names:
            raise ValueError(f"field {name!r} is named twice")
        names[name] = choices
    if not names:
        raise ValueError("no field is named; None stands for all of them")
    return Fields(names)
