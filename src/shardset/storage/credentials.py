"""Credentials that expire, fetched once a node.

What a server hands out (instance metadata, containers, web identity) is fetched under a lock and kept in a private file
until shortly before it expires, so that the 64 workers of a job ask once and not 64 times.

A credential stands in no message, log, repr or pickle.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import orjson

from shardset.errors import AccessError
from shardset.files import cache_root, lock_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Fetched = tuple[dict[str, str], float | None]
    """A credential as obstore wants it, and when it expires, in seconds since 1970; None for never."""

logger = logging.getLogger(__name__)

# obstore asks anew when less than 5 minutes are left; by then it must get a newer one than it has.
_MARGIN: Final = 360.0
# What hands out credentials may have no newer one yet. Then it is asked again after so many seconds, not at each call.
_ASK_AGAIN: Final = 60.0
_CONNECT: Final = 1.0
_ANSWER: Final = 10.0
_TRIES: Final = 3
_MOST: Final = 1 << 20


class SharedCredential:
    """A credential that expires, shared by all processes of this user on this machine. obstore calls it.

    Args:
        source: What it comes from, in words that differ wherever the credential does; only a digest of it is stored.
        fetch: Asks for a new one.

    Attributes:
        error: Why the last call failed; None if it did not. obstore passes on only a text.
    """

    __slots__ = ("_fetch", "_kept", "_lock", "_name", "error")

    def __init__(self, source: str, fetch: Callable[[], Fetched]) -> None:
        self._name = hashlib.sha256(source.encode()).hexdigest()[:32]
        self._fetch = fetch
        self._lock = threading.Lock()
        self._kept: _Kept | None = None
        self.error: Exception | None = None

    def __repr__(self) -> str:
        return "SharedCredential()"

    def __call__(self) -> dict[str, Any]:
        """Return the credential, from this process, from the file that the node shares, or from its source.

        Raises:
            AccessError: The source gives none.
        """
        self.error = None
        with self._lock:
            if self._kept is None or not self._kept.is_fresh():
                try:
                    self._kept = self._share()
                except Exception as error:
                    self.error = error
                    raise
            kept = self._kept
        expires = None if kept.expires is None else datetime.fromtimestamp(kept.expires, UTC)
        return {**kept.credential, "expires_at": expires}

    def _share(self) -> _Kept:
        folder = private_folder()
        if folder is None:
            return self._ask()
        path = folder / f"{self._name}.json"
        lock = lock_file(folder / f"{self._name}.lock")
        if lock is None:
            return self._ask()
        with lock:
            kept = _load(path)
            if kept is None or not kept.is_fresh():
                kept = self._ask()
                _save(path, kept)
        return kept

    def _ask(self) -> _Kept:
        credential, expires = self._fetch()
        return _Kept(credential, expires, time.time())


@dataclass(frozen=True, slots=True)
class _Kept:
    """A credential and its times, in seconds since 1970."""

    credential: dict[str, str] = field(repr=False)
    expires: float | None
    fetched: float

    def is_fresh(self) -> bool:
        now = time.time()
        if self.expires is None or self.expires - now > _MARGIN:
            return True
        return self.expires - now > _ASK_AGAIN / 2 and 0 <= now - self.fetched < _ASK_AGAIN


def private_folder() -> Path | None:
    """Return the folder for what this user's processes share in secret; None where nobody can vouch for one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = (Path(runtime) / "shardset" if runtime and Path(runtime).is_dir() else cache_root()) / "credentials"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        state = folder.lstat()
    except OSError as error:
        logger.debug("credentials are not shared between processes: %s", error)
        return None
    if hasattr(os, "getuid") and (state.st_uid != os.getuid() or state.st_mode & 0o077 or folder.is_symlink()):
        logger.warning("credentials are not shared between processes: others may look into %s", folder)
        return None
    return folder


def _load(path: Path) -> _Kept | None:
    try:
        stored = orjson.loads(path.read_bytes())
        return _Kept(stored["credential"], stored["expires"], stored["fetched"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or from another version: asked for anew


def _save(path: Path, kept: _Kept) -> None:
    content = orjson.dumps({"credential": kept.credential, "expires": kept.expires, "fetched": kept.fetched})
    temporary = path.with_name(f".{os.getpid()}-{secrets.token_hex(6)}.tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        logger.debug("a credential is not shared between processes: %s", error)


def ask_json(url: str, headers: Mapping[str, str], body: bytes | None = None) -> dict[str, Any]:
    """Ask as `send` does, for an object in JSON.

    Raises:
        AccessError: As `send`, or the answer is something else.
    """
    answer = send(url, headers, body=body)
    try:
        found = orjson.loads(answer)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise AccessError(f"what hands out credentials at {_origin(url)} answered something else")
    return found


def send(url: str, headers: Mapping[str, str], *, body: bytes | None = None, method: str | None = None) -> bytes:
    """Ask a server that hands out credentials. On plain HTTP no proxy comes between; no redirect is followed.

    Raises:
        AccessError: It refuses, or does not answer.
    """
    import urllib.request  # noqa: PLC0415 - takes 20 ms, and most processes find their credential in a file
    from urllib.error import HTTPError  # noqa: PLC0415

    class Nowhere(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    is_near = url.startswith("http://")
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_near else []), Nowhere)
    for attempt in range(_TRIES):
        request = urllib.request.Request(url, data=body, headers=dict(headers), method=method)  # noqa: S310
        try:
            if is_near:
                _knock(url)
            with opener.open(request, timeout=_ANSWER) as answer:
                return bytes(answer.read(_MOST))
        except HTTPError as error:
            what = f"status {error.code}"
            error.close()
            if error.code < 500 and error.code != 429:
                break
        except (OSError, ValueError, HTTPException) as error:
            what = type(error).__name__
            if attempt or isinstance(getattr(error, "reason", error), ConnectionRefusedError):
                break
        time.sleep(0.2 * 2**attempt)
    raise AccessError(f"nobody hands out credentials at {_origin(url)} ({what})")


def _knock(url: str) -> None:
    """Fail soon where nobody listens: metadata servers are near, and most machines have none."""
    parts = urlsplit(url)
    socket.create_connection((parts.hostname or "", parts.port or 80), timeout=_CONNECT).close()


def read_token(path: str) -> str:
    """Return the content of a file that holds a token.

    Raises:
        AccessError: It cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise AccessError(f"the token file {path} cannot be read") from None


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}"
