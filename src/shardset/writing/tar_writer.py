"""`TarWriter`: samples into one tar, with the arguments of webdataset's class of that name."""

from __future__ import annotations

import os
import warnings
from typing import IO, TYPE_CHECKING, Any, NoReturn, Self

from .sample_encoders import make_encoder
from .sample_members import MemberMaker
from .shard_output import compressed, open_output, parse_compression
from .tar_headers import HeaderMaker
from .tar_stream import TarStream

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from shardset.storage.store import Store

    from .sample_encoders import EncoderSpec


class TarWriter:
    """Writes samples into one tar; use it with ``with``.

    A sample is a dict with ``__key__`` and fields: ``{"__key__": "a/1", "jpg": ..., "cls": 3}`` becomes the members
    ``a/1.cls`` and ``a/1.jpg``, in the order of the field names. Fields that begin with ``_`` are left out.

    Equal samples give equal bytes: headers are *ustar* with a fixed time, and only where that cannot hold a name (not
    ASCII, or too long) or a size (8 GiB and more) a PAX extension header stands before them. The tar has a hidden name
    until it is closed; an error in the block leaves nothing behind and what was there before as it was.

    What would not be read back as it is, is refused: keys with a dot in their last part, absolute ones, ones with
    ``..`` or a backslash, keys that were written before, fields with capitals, and samples without a field.

    Args:
        fileobj: A path, a url of any store that can be written to, ``pipe:COMMAND``, ``-`` for standard output, or a
            binary file, which stays open.
        user: Name of the owner, in the headers.
        group: Name of the group.
        mode: Permissions.
        compress: ``"gz"`` or True, ``"bz2"``, ``"xz"``, ``"zst"``, or False for none; None goes by the file's suffix.
        encoder: How values become bytes: True by the field's last part (`sample_encoders` has the table), False where
            they are bytes or text already, a dict of functions by last part, or a function of the sample.
        keep_meta: Write fields that begin with ``_`` too; never ``__key__``, ``__url__`` and ``__local_path__``.
        mtime: The time in the headers, in seconds since 1970; None is 0. A fraction needs PAX headers.
        format: ``tarfile.USTAR_FORMAT``, ``GNU_FORMAT`` or ``PAX_FORMAT``; None is as said above.
        store: Where a url lives; by default the place that its scheme names.

    Raises:
        ValueError: An argument is not one of these, or the format cannot hold it.
        StorageError: Nothing can be written there.
    """

    def __init__(  # noqa: PLR0917 - webdataset's order
        self,
        fileobj: str | os.PathLike[str] | IO[bytes],
        user: str = "bigdata",
        group: str = "bigdata",
        mode: int = 0o444,
        compress: bool | str | None = None,
        encoder: EncoderSpec = True,
        keep_meta: bool = False,
        mtime: float | None = None,
        format: int | str | None = None,  # noqa: A002 - webdataset's name
        *,
        store: Store | None = None,
    ) -> None:
        maker = member_maker(
            user=user, group=group, mode=mode, encoder=encoder, keep_meta=keep_meta, mtime=mtime, format=format
        )
        kind = parse_compression(compress, fileobj)
        self._stream = TarStream(compressed(open_output(fileobj, store), kind), maker, target_name(fileobj))

    def write(self, obj: Mapping[str, Any]) -> int:
        """Write one sample.

        Returns:
            Bytes of its payloads.

        Raises:
            EncodeError: It cannot be written as it is; its ``hint`` says what to do. Nothing of it was written, and the
                next one can be.
            DuplicateFieldError: Its key was written before; likewise.
            StorageError: Writing failed; nothing is left of the tar.
            ValueError: The writer is closed.
        """
        return self._stream.write(obj)

    def close(self) -> None:
        """Write the end, and give the tar its name. A second time does nothing.

        Raises:
            StorageError: The disk is full, or writing failed; nothing is left of the tar.
        """
        self._stream.close()

    def discard(self) -> None:
        """Write nothing after all. The writer is then closed."""
        self._stream.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a writer cannot be pickled: make one in each process, with a name of its own")

    def __del__(self) -> None:
        stream = getattr(self, "_stream", None)
        if stream is not None and stream.is_own:
            stream.discard()
            warnings.warn(
                f"{self!r} was not closed, so nothing was written", ResourceWarning, stacklevel=1, source=self
            )

    def __repr__(self) -> str:
        return f"TarWriter({self._stream.name!r})"


def member_maker(
    *,
    user: str = "bigdata",
    group: str = "bigdata",
    mode: int = 0o444,
    encoder: EncoderSpec = True,
    keep_meta: bool = False,
    mtime: float | None = None,
    format: int | str | None = None,  # noqa: A002 - webdataset's name
) -> MemberMaker:
    """Return what makes the members of samples, from the arguments of `TarWriter`.

    Raises:
        ValueError: An argument cannot be.
    """
    headers = HeaderMaker(user=user, group=group, mode=mode, mtime=0 if mtime is None else mtime, format=format)
    return MemberMaker(headers, make_encoder(encoder), keep_meta=keep_meta)


def target_name(target: object) -> str:
    """Return what a shard is called in messages."""
    name = os.fspath(target) if isinstance(target, str | os.PathLike) else getattr(target, "name", None)
    return name if isinstance(name, str) else f"<{type(target).__name__}>"
