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

if TYPE_CHECKING:
    from shardset.dataset.files import ShardFiles
    from shardset.formats.captions import Captions, CaptionValue
    from shardset.storage.store import Reader


class TarFileEntry:
    """A file of a shard with its payload, and with what its sidecars say of it.

    Sidecar members are read when `json_data`, `captions` or `caption` is asked for; entries that come from iteration
    have no sidecars, as in webshart.

    Attributes:
        data: The payload: bytes, or a view if the loader was made with ``copy=False``; empty if it does not load data.
        job_id: ``shardNNNN_fileNNNNNN``, by the number that the entry was asked for with.
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
        """With `reader`, `number` is that of a sample of the shard; without, that of a file."""
        self._files = files
        self._row = row
        self.data = data
        self._shard_index = shard_index
        self._number = number
        self._reader = reader

    # Looked up when asked for: most entries are only asked for their payload.
    @property
    def _json_row(self) -> int:
        return -1 if self._reader is None else self._files.json_rows[self._number]

    @property
    def _text_row(self) -> int:
        return -1 if self._reader is None else self._files.text_rows[self._number]

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
        """``shardNNNN_fileNNNNNN``."""
        return f"shard{self._shard_index:04d}_file{self._number:06d}"

    @property
    def width(self) -> int | None:
        """Width in pixels as stored, if the index holds it."""
        size = self._files.geometry(self._row)
        return size and size[0]

    @property
    def height(self) -> int | None:
        """Height in pixels as stored, if the index holds it."""
        size = self._files.geometry(self._row)
        return size and size[1]

    @property
    def aspect(self) -> float | None:
        """Width by height as stored, if the index holds them."""
        size = self._files.geometry(self._row)
        return size and size[0] / size[1]

    @property
    def json_path(self) -> str | None:
        """Name of the JSON sidecar."""
        return self._files.names[self._json_row] if self._json_row >= 0 else None

    @property
    def json_data(self) -> bytes | None:
        """The JSON sidecar's payload.

        Raises:
            StorageError: It cannot be read.
        """
        if self._json_row < 0 or self._reader is None:
            return None
        return self._files.read(self._reader, self._json_row)

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
        if self._text_row >= 0 and self._reader is not None:
            try:
                found = captions_from_text(self._files.read(self._reader, self._text_row))
            except ValueError as error:
                raise DecodeError(
                    f"sidecar {self._files.names[self._text_row]!r}: {error}",
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
    def metadata(self) -> dict[str, Any]:
        """Everything that the index says of the file: ``path, offset, size`` and what else is known."""
        known: dict[str, Any] = {"path": self.path, "offset": self.offset, "size": self.size}
        size = self._files.geometry(self._row)
        if size is not None:
            known |= {"width": size[0], "height": size[1], "aspect": size[0] / size[1]}
        if self._json_row >= 0:
            known["json_path"] = self.json_path
        captions = self._files.captions(self._row)
        if captions is not None:
            known["captions"] = captions
        return known | self._files.further(self._row)

    def __repr__(self) -> str:
        return f"TarFileEntry(path={self.path!r}, offset={self.offset}, size={self.size}, job_id={self.job_id!r})"
