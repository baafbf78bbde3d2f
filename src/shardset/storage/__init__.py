"""Where bytes live: size and identity, one range or many, list, write. Nothing here knows what the bytes mean."""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from .anywhere import AnyStore, open_store
from .local import LocalStore
from .memory import MemoryStore
from .store import ABSENT, ObjectInfo, Reader, Store, url_join, url_name

if TYPE_CHECKING:
    from .adapter import FsspecStore
    from .cache import CachedStore
    from .cache_process import CacheEvent, CacheStats
    from .cloud import CloudStore
    from .http import HttpStore
    from .planner import ReadLimits
    from .retry import Retry

__all__ = [
    "ABSENT",
    "AnyStore",
    "CacheEvent",
    "CacheStats",
    "CachedStore",
    "CloudStore",
    "FsspecStore",
    "HttpStore",
    "LocalStore",
    "MemoryStore",
    "ObjectInfo",
    "ReadLimits",
    "Reader",
    "Retry",
    "Store",
    "open_store",
    "url_join",
    "url_name",
]

# What reading local files does not need is loaded when it is asked for.
_HOMES = {
    **dict.fromkeys(("CacheEvent", "CacheStats"), ".cache_process"),
    "CachedStore": ".cache",
    "CloudStore": ".cloud",
    "FsspecStore": ".adapter",
    "HttpStore": ".http",
    "ReadLimits": ".planner",
    "Retry": ".retry",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value
