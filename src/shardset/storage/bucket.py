"""One bucket, in one process: requests over obstore, repeated by the one policy, each answer checked."""

from __future__ import annotations

import logging
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

from shardset.errors import AccessError, ChangedError, NotFoundError, RangeIgnoredError, StorageError, without_secrets
from shardset.policy import Place

from . import threads, transport
from .access import azure_access, gcs_access, s3_access
from .native import Fault, load_obstore, parse_fault
from .retry import Attempts, Retry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from typing_extensions import Buffer

    from shardset.policy import Report

    from .access import Access
    from .retry import HostBudget
    from .store import ObjectInfo

    Purpose = Literal["read", "write", "write parts"]
    """What a client is for: how long it waits for an answer, and whether obstore repeats what fails."""

    Result = TypeVar("Result")

logger = logging.getLogger(__name__)

PART: Final = 16 << 20
"""Bytes; what is longer is written in parts of so many."""
_STORES: Final = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
_NAMES: Final = {"s3": "the S3 bucket", "gs": "the Google Cloud Storage bucket", "az": "the Azure container"}
_PAGE: Final = 1000
# Shorter answers come in one piece, which costs least; of longer ones, what has come is kept when the rest does not.
_ONE_PIECE: Final = 256 << 10
_PARTS: Final = 10_000
_PARTS_AT_ONCE: Final = 4
# obstore's clock for silence runs while a request's body is still being sent.
_SEND_SLOWER: Final = 10
_HINTS: Final = {
    "s3": "look at AWS_PROFILE and the rights on this bucket; a public bucket needs no login: AWS_SKIP_SIGNATURE=true. "
    "S3 also says 403 for a missing object where listing is not allowed",
    "gs": "run: gcloud auth application-default login, and look at the rights on this bucket; a public bucket needs no "
    "login: GOOGLE_SKIP_SIGNATURE=true",
    "az": "look at AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN and the rights on this container; a public "
    "container needs no login: AZURE_SKIP_SIGNATURE=true",
}


class CloudPlace(NamedTuple):
    """Where a url leads.

    Attributes:
        kind: ``"s3"``, ``"gs"`` or ``"az"``.
        bucket: Bucket or container.
        key: Key or blob name as it stands; ``""`` for the bucket itself.
        account: Azure's storage account, where the url names it.
    """

    kind: str
    bucket: str
    key: str
    account: str | None = None


class Bucket:
    """Talks to one bucket, in one process."""

    def __init__(self, place: CloudPlace, native: Any, store: Any, access: Access, retry: Retry) -> None:
        self.kind = place.kind
        self._native = native
        self._store = store
        # Promised by S3 (ListObjectsV2, but not for directory buckets) and Google (objects.list).
        self.is_sorted = place.kind == "gs" or (place.kind == "s3" and not place.bucket.endswith("--x-s3"))
        self._bucket = place.bucket
        self._access = access
        self._retry = retry
        host = access.endpoint or f"https://{place.account or place.bucket}.{place.kind}"
        self._budget: HostBudget = transport.budget(host)

    def head(self, url: str, key: str) -> dict[str, Any]:
        """Return what the service says of an object."""
        return dict(self.ask(url, lambda: self._native.head(self._store, key)))

    def ask(self, url: str, call: Callable[[], Result], *, changes: bool = False) -> Result:
        """Make one request until it is answered. `changes` is for a write under a condition."""
        attempts = Attempts(self._retry, url)
        while True:
            attempts.begin()
            try:
                with self._budget.slot():
                    return call()
            except Exception as error:  # noqa: BLE001 - obstore's errors are told apart by their texts
                self.settle(error, url, attempts, changes=changes)

    def settle(self, error: Exception, url: str, attempts: Attempts, *, changes: bool = False) -> None:
        """Wait before the next attempt, or raise what an error of obstore means.

        Texts of obstore are never passed on: they quote addresses and answers, which may hold signatures.
        """
        if isinstance(error, StorageError):
            raise error
        own = self._access.provider.error if self._access.provider else None
        if isinstance(own, AccessError):
            raise AccessError(own.message, url=url, hint=own.hint) from None
        fault = parse_fault(error)
        if fault is None:
            raise error
        if fault.meaning == "retry":
            threads.pause(attempts.fail(fault.what, status=fault.status))
            return
        raise self._error(fault, url, attempts, changes=changes) from None

    def _error(self, fault: Fault, url: str, attempts: Attempts, *, changes: bool) -> StorageError:
        where = f"in {_NAMES[self.kind]} {self._bucket}"
        shown = ", ".join(
            [*([f"status {fault.status}"] if fault.status else []), *([fault.code] if fault.code else [])]
        )
        reason = f" ({shown})" if shown else ""
        if fault.meaning == "missing":
            return NotFoundError(f"no such object {where}{reason}", url=url)
        if fault.meaning == "refused":
            return AccessError(f"no access to what lies {where}{reason}", url=url, hint=_HINTS[self.kind])
        if fault.meaning == "changed":
            return not_written(url) if changes else _is_other(url)
        if fault.meaning == "range":
            return RangeIgnoredError(fault.what, url=url)
        said = f": {fault.code}" if fault.code else ""
        failed = attempts.error(f"{fault.what} {where}{said}", status=fault.status)
        failed.hint = fault.hint
        return failed

    def fetch(self, info: ObjectInfo, key: str, offset: int, view: memoryview) -> None:
        """Fill a view with bytes of one version of an object."""
        attempts = Attempts(self._retry, info.url)
        length, reached = len(view), 0
        # Weak ones match nothing (RFC 9110, 13.1.1), and what is made of a date is no etag.
        options: dict[str, Any] = {}
        if not info.identity.startswith(("W/", "date:")):
            options["if_match"] = f'"{info.identity}"'
        while reached < length:
            attempts.begin()
            before = reached
            options["range"] = wanted = (offset + reached, offset + length)
            try:
                with self._budget.slot():
                    answer = self._native.get(self._store, key, options=options)
                    _check_answer(info, answer, wanted)
                    pieces = (answer.bytes(),) if length - reached <= _ONE_PIECE else answer.stream(_ONE_PIECE)
                    for piece in pieces:
                        reached += _copy(info.url, piece, view[reached:])
                        threads.look_up()
            except Exception as error:  # noqa: BLE001 - as in `ask`
                attempts.progress(reached - before, length - reached)
                self.settle(error, info.url, attempts)
            else:
                if reached < length:
                    attempts.progress(reached - before, length - reached)
                    threads.pause(attempts.fail("the answer ended too early"))

    def iter_names(self, url: str, prefix: str, report: Report | None) -> Iterator[Mapping[str, Any]]:
        """Yield what the service lists; after a fault go on behind the last name, or anew where there is no order."""
        attempts = Attempts(self._retry, url)
        last = ""
        held: list[Mapping[str, Any]] = []
        while True:
            attempts.begin()
            held.clear()
            try:
                after = {"offset": last} if last else {}
                stream = self._native.list(self._store, prefix or None, chunk_size=_PAGE, **after)
                while True:
                    with self._budget.slot():
                        page = next(stream, None)
                    if page is None:
                        break
                    attempts.progress(_PAGE << 10, 0)
                    for meta in page:
                        if not meta["size"] and self._is_folder(url, prefix, meta["path"], last, report):
                            continue
                        if not self.is_sorted:
                            held.append(meta)
                            continue
                        last = _following(url, last, meta["path"])
                        yield meta
            except Exception as error:  # noqa: BLE001 - as in `ask`
                self.settle(error, url, attempts)
            else:
                yield from held
                return

    def _is_folder(self, url: str, prefix: str, path: str, last: str, report: Report | None) -> bool:
        """Find out whether an empty object's name really ends with a slash, which obstore does not show."""
        if path == prefix:
            return True
        if path > last:  # or else the slash was what put it here
            try:
                self.head(url, path)
            except NotFoundError:
                pass
            else:
                return False
        place = Place(f"{url.removesuffix('/')}/{path[len(prefix) + 1 if prefix else 0 :]}/")
        if report is None:
            logger.debug("passed over in a listing (not_a_file): %s", place)
        else:
            report.add("not_a_file", place)
        return True

    def put(self, url: str, key: str, content: bytes, mode: str | dict[str, str]) -> None:
        """Write in one request; `mode` is obstore's."""
        tried = 0

        def send() -> None:
            nonlocal tried
            tried += 1
            self._native.put(self._store, key, content, mode=mode, use_multipart=False)

        try:
            self.ask(url, send, changes=True)
        except ChangedError:
            # The first attempt may have come through although its answer did not.
            if tried == 1 or not self._holds(url, key, content):
                raise

    def _holds(self, url: str, key: str, content: bytes) -> bool:
        answer = self.ask(url, lambda: self._native.get(self._store, key))
        return answer.meta["size"] == len(content) and bytes(answer.bytes()) == content

    def put_parts(self, url: str, key: str, pieces: Iterator[memoryview], size: int) -> None:
        """Write in parts; `size` is what is known of it. obstore repeats a part that fails: the pieces come once."""
        raised: list[BaseException] = []

        def guarded() -> Iterator[memoryview]:
            try:
                for piece in pieces:
                    for start in range(0, len(piece), PART):
                        yield piece[start : start + PART]
            except BaseException as error:
                raised.append(error)
                raise

        attempts = Attempts(self._retry, url)
        part = max(PART, -(-size // _PARTS))
        try:
            with self._budget.slot():
                self._native.put(
                    self._store,
                    key,
                    guarded(),
                    use_multipart=True,
                    chunk_size=part,
                    max_concurrency=_PARTS_AT_ONCE,
                )
        except BaseException as error:
            if raised:
                raise raised[0] from None
            if not isinstance(error, Exception):
                raise
            attempts.made = attempts.failures = self._retry.attempts  # by obstore
            self.settle(error, url, attempts, changes=True)
            raise  # `settle` has raised: there are no attempts left


def open_bucket(place: CloudPlace, options: Mapping[str, str], retry: Retry, purpose: Purpose) -> Bucket:
    """Make a client for a bucket; no request is made.

    Raises:
        MissingExtraError: obstore, or what a login needs, is not installed.
        ValueError: An option is unknown, or the endpoint is no address.
    """
    native = load_obstore()
    access = (
        azure_access(options, place.account)
        if place.kind == "az"
        else (s3_access if place.kind == "s3" else gcs_access)(options)
    )
    if access.endpoint is not None:
        parts = urlsplit(access.endpoint)
        # obstore panics over some of these.
        if parts.scheme not in {"http", "https"} or not parts.hostname or re.search(r"\s", access.endpoint):
            raise ValueError(f"endpoint={without_secrets(access.endpoint)!r}: not the address of a server")
    stall = retry.stall if purpose == "read" else retry.stall * _SEND_SLOWER
    settings: dict[str, Any] = {
        "client_options": {
            "allow_http": access.endpoint is not None and access.endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=retry.connect),
            "read_timeout": timedelta(seconds=stall),
            "timeout": timedelta(days=1),  # the whole of a transfer may take long, as long as bytes come
        },
        # Reads and short writes are repeated here, by one policy for all stores; parts of long ones only obstore can.
        "retry_config": {
            "max_retries": retry.attempts - 1 if purpose == "write parts" else 0,
            "retry_timeout": timedelta(seconds=stall * retry.attempts),
            "backoff": {
                "init_backoff": timedelta(seconds=retry.first_wait),
                "max_backoff": timedelta(seconds=retry.longest_wait),
                "base": 2,
            },
        },
    }
    if access.provider is not None:
        settings["credential_provider"] = access.provider
    make = getattr(native.stores, _STORES[place.kind])
    try:
        store = make(place.bucket, config=access.config, **settings)
    except Exception as error:  # noqa: BLE001 - obstore raises several, and all are about the options
        fault = parse_fault(error)
        names = ", ".join(sorted(access.config))
        what = "" if fault is None else f": {fault.what}"
        raise ValueError(f"obstore does not take these options ({names}){what}") from None
    return Bucket(place, native, store, access, retry)


def identity_of(meta: Mapping[str, Any]) -> str:
    """Return the etag, in one spelling: Azure's listings, and some that speak S3, leave the quotes away."""
    etag = meta["e_tag"]
    return etag.strip('"') if etag else f"date:{int(meta['last_modified'].timestamp())}"


def _is_other(url: str) -> ChangedError:
    return ChangedError("the object changed while it was read", url=url, hint="open the dataset again")


def not_written(url: str, why: str = "it was changed") -> ChangedError:
    """Return the error of a write whose condition does not hold."""
    return ChangedError(f"not written: {why}", url=url, hint="look at it again, then decide")


def _check_answer(info: ObjectInfo, answer: Any, wanted: tuple[int, int]) -> None:
    meta = answer.meta
    if identity_of(meta) != info.identity or meta["size"] != info.size:
        raise _is_other(info.url)
    if tuple(answer.range) != wanted:
        raise RangeIgnoredError(f"asked for bytes {wanted}, got {answer.range}", url=info.url)


def _copy(url: str, piece: Buffer, view: memoryview) -> int:
    content = memoryview(piece)
    if len(content) > len(view):
        raise RangeIgnoredError("the service sent more than was asked for", url=url)
    view[: len(content)] = content
    return len(content)


def _following(url: str, last: str, path: str) -> str:
    if path <= last:
        raise StorageError(f"the service lists names in no order: {path!r} after {last!r}", url=url)
    return path
