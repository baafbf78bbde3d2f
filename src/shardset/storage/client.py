"""Asking a web server until the answer is whole: redirects, waits and new attempts, in one loop for every request."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urljoin

from shardset.errors import AccessError, NotFoundError, StorageError, secrets_in, without_secrets

from . import transport
from .answers import check_redirect, expiry_of_redirect
from .exchange import Ask, ConnectionFault
from .retry import RETRY_STATUSES, Attempts, asked_wait, parse_rate_limit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .answers import Head
    from .exchange import Sink
    from .loop import Talk
    from .retry import Retry

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS: Final = 10
_STRANGER_ATTEMPTS: Final = 5
_MOST_MESSAGE: Final = 2 << 10


class Body(Protocol):
    """What is asked for, and what takes it."""

    def ask(self) -> Mapping[str, str]:
        """Return the headers that ask for what is still missing."""

    def accept(self, head: Head) -> Sink | None:
        """Check the head of a good answer, and return what takes its body; None if nothing of it is wanted.

        Raises:
            StorageError: It is not an answer to what was asked; this is final.
        """

    def missing(self) -> int:
        """Return how many bytes are still missing; 0 too where nobody knows how many there will be."""


class WebClient:
    """Sends requests, and remembers where redirects led.

    Args:
        headers: Request headers by origin, sent to that origin and no other.
        retry: When to give up.
    """

    def __init__(self, headers: Mapping[str, Mapping[str, str]], retry: Retry) -> None:
        self._headers = {transport.origin_of(origin): dict(sent) for origin, sent in headers.items()}
        self._retry = retry
        # Where a url leads, and until when. No lock: each step on a dict is atomic.
        self._targets: dict[str, tuple[str, float]] = {}

    def forget(self) -> None:
        """Forget where redirects led."""
        self._targets.clear()

    def target(self, url: str) -> str:
        """Return where a url leads, as far as that is remembered."""
        return self._target(url)[0]

    def send(self, url: str, method: str, body: Body) -> Head:
        """Carry out a `talk`, and wait for it."""
        return transport.carry_out(self.talk(url, method, body))

    def talk(self, url: str, method: str, body: Body) -> Talk[Head]:
        """Ask until nothing is missing: the steps for `transport`.

        Returns:
            The head of the last answer: of status 200 or 206, or 412 or 416, which only the caller understands.

        Raises:
            NotFoundError: The server knows no such object.
            AccessError: It refuses access, or redirects where nobody should follow.
            RateLimitedError: It asks for too long a wait.
            TransferError: It failed too often without bringing anything, or refuses for another reason.
            StorageError: As `body.accept` raised.
        """
        attempts = Attempts(self._retry, without_secrets(url))
        renewed = False
        while True:
            attempts.begin()
            missing = body.missing()
            said = bytearray()
            target, is_remembered = self._target(url)
            try:
                head, target = yield from self._follow(url, target, method, body, said=said, attempts=attempts)
            except ConnectionFault as fault:
                attempts.progress(missing - body.missing(), body.missing())
                self._targets.pop(url, None)  # the url may lead elsewhere by now
                # A host that was there a moment ago comes back; one that never was is most often misspelled.
                if not fault.may_recover or (fault.is_stranger and attempts.failures + 1 >= _STRANGER_ATTEMPTS):
                    raise attempts.error(str(fault)) from None
                yield attempts.fail(str(fault))
                continue
            if head.status in {200, 206}:
                if not body.missing():
                    return head
                attempts.progress(missing - body.missing(), body.missing())
                if body.missing() == missing:
                    yield attempts.fail("the server sent nothing of what was asked for", status=head.status)
            elif head.status in {412, 416}:
                return head
            elif head.status in {401, 403, 404, 410} and is_remembered and not renewed:
                self._targets.pop(url, None)  # a signed address that has expired; the url leads to a new one
                renewed = True
            elif head.status in RETRY_STATUSES:
                yield self._wait(target, head, self._quote(said, url, target), attempts)
            else:
                raise _refusal(url, head, self._quote(said, url, target), attempts)

    def _wait(self, target: str, head: Head, said: str, attempts: Attempts) -> float:
        """Return the seconds to wait; if the server asks for it, every other request to it waits too."""
        asked = asked_wait(head.status, head.headers, time.time())
        wait = attempts.fail(f"the server cannot answer now{said}", status=head.status, asked=asked)
        if not asked:
            return wait
        transport.budget(target).hold(wait)
        return 0.0

    def _target(self, url: str) -> tuple[str, bool]:
        """Return where a url leads as far as that is known, and whether it was a redirect that said so."""
        known = self._targets.get(url)
        return (url, False) if known is None or known[1] < time.time() else (known[0], True)

    def _follow(
        self, url: str, target: str, method: str, body: Body, *, said: bytearray, attempts: Attempts
    ) -> Talk[tuple[Head, str]]:
        """Send one request, and follow it from redirect to redirect; remember where a good answer came from."""

        def accept(head: Head) -> Sink | None:
            return body.accept(head) if head.status in {200, 206} else collect

        def collect(piece: bytes) -> bool:
            said.extend(piece[: _MOST_MESSAGE - len(said)])
            return len(said) >= _MOST_MESSAGE

        until = math.inf
        for _ in range(_MOST_REDIRECTS + 1):
            # Asked for as it is, since a compressed body has other bytes at every offset.
            headers = {
                "Accept-Encoding": "identity",
                **self._headers.get(transport.origin_of(target), {}),
                **body.ask(),
            }
            answer = yield Ask(method, target, headers, self._retry, accept)
            assert answer is not None  # noqa: S101 - which is for a wait alone
            head = answer
            limit = parse_rate_limit(head.headers)
            if limit is not None:
                transport.budget(target).pace(*limit)
            if head.status not in _REDIRECTS or "location" not in head.headers:
                if until != math.inf and head.status in {200, 206}:
                    self._targets[url] = target, until
                return head, target
            said.clear()
            following = urljoin(target, head.headers["location"])
            check_redirect(url, target, following)
            until = min(until, expiry_of_redirect(head, following, time.time()))
            target = following
        raise attempts.error(f"more than {_MOST_REDIRECTS} redirects", status=head.status)

    def _quote(self, said: bytearray, url: str, target: str) -> str:
        """Return what a server said, if it is text that a person can read; without what let us in."""
        text = said.decode("utf-8", "replace").strip()
        if not text or text.startswith("<") or not text.isprintable():
            return ""
        sent = self._headers.get(transport.origin_of(target), {}).values()
        for secret in {*secrets_in(url), *secrets_in(target), *sent, *(value.split()[-1] for value in sent if value)}:
            text = text.replace(secret, "...")
        return f": {text[:200]}"


def _refusal(url: str, head: Head, said: str, attempts: Attempts) -> StorageError:
    """Return the error that a status means."""
    shown = f"{said} (status {head.status})"
    if head.status in {404, 410}:
        return NotFoundError(f"no such object on the server (status {head.status})", url=url)
    if head.status in {401, 403, 407, 451}:
        hint = "give a login in .netrc or HttpStore(headers=...); a signed url may have expired: sign it anew"
        return AccessError(f"the server gives no access{shown}", url=url, hint=hint)
    return attempts.error(f"the server refused{said}", status=head.status)
