"""Which parts of records are read: features by name, and the record as a whole under a name of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardset.errors import DecodeError, MissingFieldError

from .record_sample import RECORD, parse_record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer


class RecordParts(NamedTuple):
    """Which parts of records are read.

    Attributes:
        features: Names of the features to parse; None for all of them.
        required: Those that a record must have.
        whole: The payload is wanted too, under `RECORD`.
        is_payload: It is all that is wanted, so that nothing is parsed.
        takes_any: A record that is no Example is given as its payload alone, since nothing else is required of it.
    """

    features: tuple[str, ...] | None
    required: tuple[str, ...]
    whole: bool
    is_payload: bool
    takes_any: bool

    @classmethod
    def of(cls, fields: Sequence[str] | None, optional: Sequence[str] = ()) -> RecordParts:
        """Return the parts that fields name.

        Args:
            fields: Names of fields that a record must have; None for all features that it has.
            optional: Names of more fields, which it may have. With `RECORD` among them it stands in for the others.
        """
        if fields is None:
            return cls(None, (), whole=False, is_payload=False, takes_any=False)
        required = tuple(name for name in fields if name != RECORD)
        features = (*required, *(name for name in optional if name != RECORD))
        is_instead = RECORD in optional
        whole = is_instead or RECORD in fields
        return cls(features, required, whole, is_payload=whole and not features, takes_any=is_instead and not required)

    def read(self, raw: Buffer, whole: Buffer, *, shard: str, key: str, views: bool) -> dict[str, Any]:
        """Return the parts that a record has, by name, where features and the whole are wanted.

        Args:
            raw: Its payload, to be parsed.
            whole: Its payload, to be given.
            shard: Its shard, for messages.
            key: Its number, for messages.
            views: Give features as views of `raw`.

        Raises:
            DecodeError: It is no Example, and is not taken as it is.
        """
        try:
            values = parse_record(raw, self.features, shard=shard, key=key, views=views)
        except DecodeError:
            if not self.takes_any:
                raise
            values = {}
        values[RECORD] = whole
        return values


def no_feature(name: str, *, shard: str, key: str) -> MissingFieldError:
    """Return the error to raise where a record lacks a feature."""
    hint = f'see what it has: shardset show; any record is read whole: fields=["{RECORD}"]'
    return MissingFieldError(f"record {key} has no feature {name!r}", field=name, shard=shard, key=key, hint=hint)
