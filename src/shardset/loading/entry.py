"""One file of a shard, loaded: what `TarDataLoader` gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardset.errors import DecodeError
from shardset.formats.captions import (
    InvalidJson,
    captions_from_json,
    captions_from_text,
    first_caption,
    parse_json_sidecars,
)
from shardset.index.sidecar_entries import DERIVED_KEYS

if TYPE_CHECKING:
    from shardset.dataset.files import ShardFiles
    from shardset.formats.captions import Captions, CaptionValue
    from shardset.storage.store import Reader


class TarFileEntry:
    """A file of a shard with its payload, and with what its sidecars say of it.

    The sidecar members of a sample that was loaded by its number are read when `json_data`, `captions`, `caption` or
    `metadata` is asked for. Entries that come from iteration know what the index says and read none, as in webshart.

    Attributes:
        data: The payload: bytes, or a view if the loader was made with ``copy=False``; empty if it does not load data.
    """

    __slots__ = ("_files", "_number", "_reader", "_row", "_shard_index", "data")

    def __init__(  # noqa: PLR0917 - made a million times a second, and keywords cost a tenth of that
        self,
        files: ShardFiles,
        row: int,
        data: bytes | memoryview,
        shard_index: int,
        number: int,
        reader: Reader | None = None,
    ) -> None:
        """Make an entry of a row of the index.

        Args:
            files: The shard's files.
            row: Row of the index.
            data: The payload.
            shard_index: Number of the shard.
            number: What `job_id` says: that of a sample with `reader`, of a file without; -1 where it has a hash.
            reader: Reads the sidecars; without, none are read.
        """
        self._files = files
        self._row = row
        self.data = data
        self._shard_index = shard_index
        self._number = number
        self._reader = reader

    # Looked up when asked for: most entries are only asked for their payload.
    @property
    def shard_index(self) -> int:
        """Number of its shard."""
        return self._shard_index

    @property
    def file_index(self) -> int:
        """Its number among all files of its shard, in path order."""
        return self._files.file_numbers[self._row]

    @property
    def sample_index(self) -> int | None:
        """Its number among the samples of its shard, in path order; None for a sidecar."""
        number = self._files.sample_numbers[self._row]
        return None if number < 0 else number

    @property
    def key(self) -> str | None:
        """The key of the sample that ``ds[i]`` has it in: the path to the first dot of its last part, if it has one."""
        index = self._files.index
        length = int(index.key_lengths[self._row])
        return None if length < 0 else index.names[self._row][:length].decode("utf-8", "surrogateescape")

    @property
    def path(self) -> str:
        """The member's full name."""
        return self._files.names[self._row]

    @property
    def offset(self) -> int:
        """Byte offset of the payload in the shard; -1 for a sparse file."""
        return self._files.offsets[self._row]

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return self._files.lengths[self._row]

    @property
    def job_id(self) -> str:
        """``shardNNNN_fileNNNNNN``, by the number that the entry was asked for with: of a sample, or of a file.

        Two files may have one `job_id`, and a `BucketDataLoader` gives a hash of the path; `shard_index`, `file_index`
        and `sample_index` are never ambiguous.
        """
        if self._number < 0:
            return f"file_{_hash_of(self.path):08x}"
        return f"shard{self._shard_index:04d}_file{self._number:06d}"

    @property
    def width(self) -> int | None:
        """Width in pixels as stored, if the index holds it."""
        return self._files.width(self._row)

    @property
    def height(self) -> int | None:
        """Height in pixels as stored, if the index holds it."""
        return self._files.height(self._row)

    @property
    def aspect(self) -> float | None:
        """Width by height as stored, in single precision, if the index holds it or both of them."""
        return self._files.aspect(self._row)

    @property
    def json_path(self) -> str | None:
        """Name of the JSON sidecar."""
        place = self._files.json_place(self._row)
        return None if place is None else place.path

    @property
    def json_data(self) -> bytes | None:
        """The JSON sidecar's payload.

        Raises:
            StorageError: It cannot be read.
        """
        return None if self._reader is None else self._files.read_json(self._reader, self._row)

    @property
    def json_metadata(self) -> Any:
        """The JSON sidecar's value: that of the index, or else that of the sidecar.

        Raises:
            DecodeError: The sidecar is no JSON.
            StorageError: It cannot be read.
        """
        known = self._files.further(self._row)
        if "json_metadata" in known:
            return known["json_metadata"]
        payload = self.json_data
        if payload is None:
            return None
        value = parse_json_sidecars([payload])[0]
        if isinstance(value, InvalidJson):
            raise DecodeError(
                f"sidecar {self.json_path!r} is no JSON: {value.error}",
                field="json",
                shard=self._files.url,
                key=self.path,
            )
        return value

    @property
    def captions(self) -> Captions:
        """All captions: a text, an object, a list of these, or None. The index comes first, then ``.txt``, ``.json``.

        Raises:
            DecodeError: A sidecar cannot be understood.
            StorageError: It cannot be read.
        """
        known = self._files.captions(self._row)
        if known is not None:
            return known
        text_row = self._text_row
        if text_row >= 0 and self._reader is not None:
            try:
                found = captions_from_text(self._files.read(self._reader, text_row))
            except DecodeError as error:
                raise DecodeError(
                    f"sidecar {self._files.names[text_row]!r}: {error}",
                    field="txt",
                    shard=self._files.url,
                    key=self.path,
                ) from error
            if found is not None:
                return found
        document = self.json_metadata
        return None if document is None else captions_from_json(document)

    @property
    def caption(self) -> CaptionValue | None:
        """The first of `captions`."""
        return first_caption(self.captions)

    @property
    def _text_row(self) -> int:
        sample = self._files.sample_numbers[self._row]
        return -1 if sample < 0 else self._files.text_rows[sample]

    @property
    def metadata(self) -> dict[str, Any]:
        """What is known of the file: ``path, offset, size``, and ``width, height, aspect, json_path, captions``...

        Further fields of its entry in the index stand beside them. The captions are `captions`, sidecars included.

        Raises:
            As `captions`.
        """
        known: dict[str, Any] = {"path": self.path, "offset": self.offset, "size": self.size}
        values = (self.width, self.height, self.aspect, self.json_path, self.captions)
        names = ("width", "height", "aspect", "json_path", "captions")
        known |= {name: value for name, value in zip(names, values, strict=True) if value is not None}
        further = self._files.further(self._row)
        return known | {name: value for name, value in further.items() if name not in DERIVED_KEYS}

    def __repr__(self) -> str:
        parts = [f"path={self.path!r}", f"offset={self.offset}", f"size={self.size}"]
        parts += [
            f"{name}={value}" for name, value in (("width", self.width), ("height", self.height)) if value is not None
        ]
        aspect = self.aspect
        if aspect is not None:
            parts.append(f"aspect={aspect:.2f}")
        parts.append(f"shard_idx={self._shard_index}")
        if self._number >= 0:
            parts.append(f"file_idx={self._number}")
        return f"TarFileEntry({', '.join(parts)})"


def _hash_of(path: str) -> int:
    """Return the number in webshart's `job_id` of files out of buckets: h = 31 h + character, in 32 bits."""
    value = 0
    for character in path:
        value = (value * 31 + ord(character)) & 0xFFFFFFFF
    return value
