"""Where bytes live: size and identity, one range or many, list, write. Nothing here knows what the bytes mean."""

from __future__ import annotations

from .local import LocalStore
from .memory import MemoryStore
from .store import ObjectInfo, Reader, Store, open_store, url_join, url_name

__all__ = ["LocalStore", "MemoryStore", "ObjectInfo", "Reader", "Store", "open_store", "url_join", "url_name"]
