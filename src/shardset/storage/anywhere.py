"""Every place at once: each url goes to the store of its scheme."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .store import Reader, Store, url_scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from typing_extensions import Buffer

    from shardset.policy import Report

    from .store import ObjectInfo


def open_store(url: str) -> Store:
    """Return a new store for the place that `url` lies in, with the settings that its users expect.

    Paths (also with a drive letter) and ``file://`` are this machine's files; ``http://`` and ``https://`` web servers;
    ``s3://``, ``gs://`` and ``az://`` object stores; every other scheme is left to fsspec.

    Raises:
        MissingExtraError: The scheme needs an extra that is not installed.
        ValueError: The scheme is ``memory``, whose objects live in one `MemoryStore` that must be handed over.
    """
    scheme = url_scheme(url)
    if scheme in {"", "file"}:
        from .local import LocalStore  # noqa: PLC0415 - only what is used is loaded

        return LocalStore()
    if scheme in {"http", "https"}:
        from .http import HttpStore  # noqa: PLC0415

        return HttpStore()
    if scheme == "memory":
        raise ValueError(f"{url}: objects in memory belong to one MemoryStore; pass that store")
    from .cloud import SCHEMES, CloudStore  # noqa: PLC0415

    if scheme in SCHEMES:
        return CloudStore()
    from .adapter import FsspecStore  # noqa: PLC0415

    return FsspecStore()


def store_for(store: Store | None, root: str, *others: str | None) -> Store:
    """Return a store for urls that may lie in several places.

    Args:
        store: Serves urls of the scheme of `root`; None for the place that each scheme names.
        root: A url.
        others: Further urls that have to be reached; None for none.
    """
    if store is None:
        return AnyStore()
    place = _place(url_scheme(root))
    if isinstance(store, AnyStore) or all(other is None or _place(url_scheme(other)) == place for other in others):
        return store
    return AnyStore({place: store})


class AnyStore(Store):
    """All stores behind one: each url goes to the store of its scheme, which is made when it is first needed.

    Args:
        stores: Stores to use for some schemes (``""`` for paths); others are made by `open_store`.
    """

    def __init__(self, stores: Mapping[str, Store] | None = None) -> None:
        self._stores: dict[str, Store] = {_place(scheme): store for scheme, store in (stores or {}).items()}

    def __reduce__(self) -> tuple[Callable[[], AnyStore], tuple[()]]:
        return partial(AnyStore, self._stores), ()

    def __repr__(self) -> str:
        return f"AnyStore({sorted(self._stores)})"

    def store_of(self, url: str) -> Store:
        """Return the store that a url goes to.

        Raises:
            As `open_store`.
        """
        place = _place(url_scheme(url))
        store = self._stores.get(place)
        return store if store is not None else self._stores.setdefault(place, open_store(url))

    def info(self, url: str) -> ObjectInfo:
        """Look up the object, as `Store.info` says."""
        return self.store_of(url).info(url)

    def open(self, url: str, known: ObjectInfo | None = None) -> Reader:
        """Open the object, as `Store.open` says."""
        return self.store_of(url).open(url, known)

    def list(self, url: str, report: Report | None = None) -> Iterator[ObjectInfo]:
        """Find the objects below a folder, as `Store.list` says."""
        return self.store_of(url).list(url, report)

    def write(self, url: str, data: Buffer | Iterable[Buffer], *, expect: str | None = None) -> None:
        """Write the object, as `Store.write` says."""
        self.store_of(url).write(url, data, expect=expect)

    def close(self) -> None:
        """Close every store that was made."""
        for store in self._stores.values():
            store.close()


def _place(scheme: str) -> str:
    """Return the scheme that stands for all that one store serves."""
    return {"file": "", "https": "http"}.get(scheme, scheme)
