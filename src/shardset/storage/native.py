"""obstore's compiled module, loaded so that a forked child can use it, and its errors, told apart by their texts."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from importlib import import_module
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from shardset.errors import MissingExtraError, StorageError

from .retry import RETRY_STATUSES

_STATUS: Final = re.compile(r"status code: ([0-9]{3})")
_CODE: Final = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_RETRY_CODES: Final = frozenset({"RequestTimeout", "SlowDown", "InternalError", "OperationAborted", "ServerBusy"})
_LOGIN_CODES: Final = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId"})


class Obstore:
    """The functions and classes that are used, from one copy of the module."""

    def __init__(self, module: Any) -> None:
        self.get = module.get
        self.head = module.head
        self.list = module.list
        self.put = module.put
        self.stores = module._store  # noqa: SLF001 - in a copy there is no other way to its classes


# (process id, obstore): its threads belong to a process; replaced as a whole.
_loaded: tuple[int, Obstore] | None = None


def load_obstore() -> Obstore:
    """Return obstore, in a forked child as a copy of its own.

    The module starts its threads when it is first used, and keeps them where no child can start others: in a child of
    a process that has used it, every call would wait for ever. A second copy of the file is a second module to the
    loader, with threads of its own. That costs 15 ms a child.

    Raises:
        MissingExtraError: It is not installed.
    """
    global _loaded  # noqa: PLW0603 - see above
    loaded = _loaded
    if loaded is not None and loaded[0] == os.getpid():
        return loaded[1]
    try:
        module = import_module("obstore._obstore")
    except ImportError:
        raise MissingExtraError("reading from buckets needs obstore", extra="cloud") from None
    if loaded is not None:
        module = _load_copy(module)
    _loaded = os.getpid(), Obstore(module)
    return _loaded[1]


def _load_copy(module: Any) -> Any:
    # What the copy writes into sys.modules would replace the parts that others may have imported.
    parts = {name: part for name, part in sys.modules.items() if name.partition(".")[0] == "obstore"}
    with tempfile.TemporaryDirectory(prefix="shardset-") as folder:
        path = shutil.copy(module.__file__, folder)
        loader = ExtensionFileLoader(Path(path).name.partition(".")[0], path)
        spec = spec_from_loader(loader.name, loader)
        assert spec is not None  # noqa: S101 - for the type checker: a loader was given
        try:
            copy = module_from_spec(spec)
            loader.exec_module(copy)
        except ImportError as error:
            raise StorageError(
                f"obstore cannot be loaded a second time, as a forked process needs it, from {folder}",
                hint="set TMPDIR to a folder that programs may be loaded from, or start workers by spawn",
            ) from error
    sys.modules.update(parts)
    return copy


class Fault(NamedTuple):
    """What an error of obstore means.

    Attributes:
        meaning: What to do about it.
        what: What happened, in words that quote nothing.
        status: The HTTP status, if there was one.
        code: The service's own word for it.
        hint: What to do next.
    """

    meaning: Literal["missing", "refused", "changed", "range", "retry", "final"]
    what: str
    status: int | None = None
    code: str | None = None
    hint: str | None = None


def parse_fault(error: Exception) -> Fault | None:
    """Return what an error of obstore means; None if it is not one of obstore's.

    Its text quotes addresses, answers and sometimes signatures: only status and code are taken from it.
    """
    kind, text = type(error).__name__, str(error)
    if not _is_obstores(error, text):
        return None
    found = _STATUS.search(text)
    status = int(found[1]) if found else None
    found = _CODE.search(text)
    code = found[1] if found else None
    return Fault(*_judge(kind, text, status, code))


def _is_obstores(error: Exception, text: str) -> bool:
    return type(error).__module__.startswith("obstore") or (
        isinstance(error, FileNotFoundError | ValueError | OSError) and ("Debug source:" in text or "obstore" in text)
    )


def _judge(
    kind: str, text: str, status: int | None, code: str | None
) -> tuple[
    Literal["missing", "refused", "changed", "range", "retry", "final"], str, int | None, str | None, str | None
]:
    if status in RETRY_STATUSES or code in _RETRY_CODES:
        return "retry", "the service cannot answer now", status, code, None
    if kind == "FileNotFoundError" or status == 404:
        return "missing", "", status, code, None
    if kind in {"PermissionDeniedError", "UnauthenticatedError"} or status in {401, 403} or code in _LOGIN_CODES:
        return "refused", "", status, code, None
    if "token request" in text or "redential" in text.partition("Debug source")[0]:
        return "refused", "no login was found", status, code, None
    if kind in {"PreconditionError", "AlreadyExistsError"} or status in {409, 412, 416} or "Wanted range" in text:
        return "changed", "", status, code, None
    if "non-partial response" in text:
        return "range", "the service ignores ranges: it sent the whole object", status, code, None
    if "Requested " in text and ", got " in text:
        return "range", "the service sent another range than was asked for", status, code, None
    if status is None and "HTTP error" in text:
        return _judge_connection(text)
    if kind == "InvalidPathError":
        hint = "names with empty parts ('//'), '.' or '..' parts, or control characters have to be renamed"
        return "final", "a name that obstore cannot list lies", status, code, hint
    if "redirect" in text or status in {301, 307, 308} or code == "PermanentRedirect":
        hint = "the bucket is in another region: set AWS_REGION or the option region"
        return "final", "the service sends elsewhere", status, code, hint
    return "final", "the service refused what was asked", status, code, None


def _judge_connection(
    text: str,
) -> tuple[Literal["retry", "final"], str, None, None, str | None]:
    if "InvalidCertificate" in text or "UnknownIssuer" in text:
        return "final", "the service's certificate is not trusted", None, None, "look at the endpoint and the clock"
    for sign, what in (
        ("TimedOut", "nothing came for too long"),
        ("dns error", "the host's name is not known"),
        ("ConnectionRefused", "the host refuses connections"),
        ("kind: Connect", "no connection could be made"),
    ):
        if sign in text:
            return "retry", what, None, None, None
    return "retry", "the connection broke", None, None, None
