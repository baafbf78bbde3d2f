"""Where a conversion stands, as it is kept in a file between runs. File and fields are those of webshart 0.6.0."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from shardset.errors import StateError

STATE_NAME: Final = ".webshart-optimize-state.json"
SCHEMA_VERSION: Final = 1
_SETTINGS: Final = (
    "schema_version",
    "source",
    "manifest_sha256",
    "output_prefix",
    "max_shard_size_bytes",
    "payload_extensions",
    "total_samples",
    "input_layout",
)
_HINT: Final = "go on with the same source and settings, or choose another destination or output_prefix"


@dataclass(slots=True)
class OptimizeState:
    """How far a conversion has come, and of what.

    Attributes:
        schema_version: Of this file.
        status: ``"running"`` or ``"complete"``.
        source: ``kind`` and ``subfolder`` of the source; no path of this machine.
        manifest_sha256: Digest of the names and sizes of all that is converted.
        output_prefix: Folder of the shards below the destination.
        max_shard_size_bytes: Where a shard is closed.
        payload_extensions: Suffixes of what is packed, with their dots.
        total_samples: How many samples there are; 0 for ``"legacy_tar"``, where nobody has counted.
        input_layout: ``"loose"`` or ``"legacy_tar"``.
        next_sample_index: Samples that are packed.
        next_shard_index: Shards that are written.
        next_source_archive_index: Of ``"legacy_tar"``: the archive to go on in.
        next_source_member_offset: The byte in it where the next member's first header is looked for.
        captioned_samples: How many of the samples that are packed have a caption.
        uncaptioned_samples: How many have none.
        bytes_sharded: Bytes of their payloads.
    """

    schema_version: int
    status: str
    source: dict[str, Any]
    manifest_sha256: str
    output_prefix: str
    max_shard_size_bytes: int
    payload_extensions: list[str]
    total_samples: int
    input_layout: str = "loose"
    next_sample_index: int = 0
    next_shard_index: int = 0
    next_source_archive_index: int = 0
    next_source_member_offset: int = 0
    captioned_samples: int = 0
    uncaptioned_samples: int = 0
    bytes_sharded: int = 0

    def dump(self) -> bytes:
        """Return the state file."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=2, sort_keys=True).encode()

    def check_resumes(self, expected: OptimizeState) -> None:
        """Check that a run which would begin with `expected` can go on from here.

        Raises:
            StateError: It is of another source or other settings, or its counts contradict each other.
        """
        changed = [name for name in _SETTINGS if getattr(self, name) != getattr(expected, name)]
        if changed:
            raise StateError(
                f"optimization state does not match this source/configuration; changed fields: {', '.join(changed)}",
                hint=_HINT,
            )
        if self.status not in {"running", "complete"}:
            raise StateError(f"invalid optimization state status: {self.status!r}", hint=_HINT)
        numbers = [getattr(self, name) for name in _COUNTS]
        if any(type(number) is not int or number < 0 for number in numbers):
            what = "negative or odd counters"
        elif self.input_layout == "loose" and self.next_sample_index > self.total_samples:
            what = f"sample position {self.next_sample_index} of {self.total_samples}"
        elif self.captioned_samples + self.uncaptioned_samples != self.next_sample_index:
            what = "caption counters that do not add up to its position"
        else:
            return
        raise StateError(f"the optimization state has {what}", hint=_HINT)


_COUNTS: Final = tuple(field.name for field in fields(OptimizeState) if field.default == 0)


def parse_state(payload: bytes, *, path: str) -> OptimizeState:
    """Read a state file.

    Args:
        payload: Its bytes.
        path: Its path, for messages.

    Raises:
        StateError: It is none.
    """
    try:
        document = json.loads(payload)
    except ValueError as error:
        raise StateError(f"the optimization state is not JSON: {error}, in {path}", hint=_HINT) from error
    names = {field.name for field in fields(OptimizeState)}
    if not isinstance(document, dict) or not document.keys() <= names:
        odd = sorted(document.keys() - names) if isinstance(document, dict) else []
        what = f"fields that nobody knows here: {', '.join(odd)}" if odd else "no object"
        raise StateError(f"the optimization state has {what}, in {path}", hint=_HINT)
    try:
        return OptimizeState(**document)
    except TypeError as error:
        raise StateError(f"the optimization state lacks fields: {error}, in {path}", hint=_HINT) from error
