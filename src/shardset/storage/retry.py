"""The one retry policy and the one budget of requests: what every remote store obeys, whatever its transport.

`Retry` says how long to go on, `Attempts` keeps count within one transfer, and a `HostBudget` is shared by all threads
that talk to one host: how many requests are under way, and when the next may begin.

Rules: a fault of the moment is tried again after a random wait that doubles; what a server says in Retry-After (RFC
9110, 10.2.3) and RateLimit (draft-ietf-httpapi-ratelimit-headers-10) comes before that; the count of failures begins
anew when bytes have arrived, so that a long transfer over a bad line comes to its end. All waits end early in a job
that nobody waits for any more (see `threads.pause`).
"""

from __future__ import annotations

import random
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final

from shardset.errors import RateLimitedError, TransferError

from .threads import look_up, pause

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

RETRY_STATUSES: Final = frozenset({408, 425, 429, *range(500, 600)} - {501, 505, 511})
"""HTTP statuses that say: not now. Final are the rest of 4xx, what a server cannot do at all, and a network's login."""
_ENOUGH: Final = 64 << 10
_AT_ONCE: Final = 64
_FEW: Final = 16
_LONGEST_PACE: Final = 60.0
_LOOK: Final = 1.0
_HINT: Final = "ask for less at once, or come back later; a shard cache asks once for each shard"
# Not the generator that programs seed for what they draw: a retry must not change it, nor follow it.
_random: Final = random.SystemRandom()

_LIMITS: Final = frozenset({"ratelimit", "ratelimit-remaining", "x-ratelimit-remaining"})
_SECONDS: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_COUNT: Final = re.compile(r"[0-9]{1,10}")
# One member of a list of structured fields (RFC 9651) with its parameters, and one parameter.
_TEXT: Final = r'"(?:[^"\\]|\\.)*+"'
_VALUE: Final = rf'(?:{_TEXT}|:[A-Za-z0-9+/=]*+:|[^\s",;:]++)'
_MEMBER: Final = re.compile(
    rf'[ \t]*+(?:{_TEXT}|[^\s",;=]++)((?:[ \t]*+;[ \t]*+[a-z*][a-z0-9_.*-]*+(?:={_VALUE})?+)*+)[ \t]*+(?:,|$)'
)
_PAIR: Final = re.compile(r"([a-z]++)=([0-9]++)")
_PAIRS: Final = re.compile(r"[a-z]++=[0-9]++(?:[ \t]*+,[ \t]*+[a-z]++=[0-9]++)*+")
_PARAMETER: Final = re.compile(rf"([a-z*][a-z0-9_.*-]*+)(?:=({_VALUE}))?+")


@dataclass(frozen=True, slots=True)
class Retry:
    """How long to go on when things fail.

    Attributes:
        attempts: How often in a row something may be tried without bringing bytes.
        first_wait: Seconds; the wait after the n-th failure is random, up to this times ``2 ** (n - 1)``.
        longest_wait: Seconds; that wait grows to at most this.
        stall: Seconds without a byte after which a connection is given up and made anew.
        connect: Seconds that making a connection may take.
        rate_limit: Seconds; a server that asks for a longer wait than this gets an error instead.
    """

    attempts: int = 8
    first_wait: float = 0.25
    longest_wait: float = 20.0
    stall: float = 30.0
    connect: float = 15.0
    rate_limit: float = 600.0

    def wait(self, failures: int) -> float:
        """Return the seconds to wait after so many failures in a row: random, so that a crowd does not come at once."""
        most = min(self.longest_wait, self.first_wait * 2.0 ** min(failures - 1, 30))
        return _random.uniform(most / 4, most)


@dataclass(slots=True)
class Attempts:
    """Counts the attempts of one transfer, and says when to stop.

    Attributes:
        retry: The policy.
        url: The address, as messages may show it.
        made: Attempts so far.
        failures: Failures since the last time that enough bytes arrived.
    """

    retry: Retry
    url: str
    made: int = 0
    failures: int = 0
    _arrived: int = 0

    def begin(self) -> None:
        """Count an attempt."""
        self.made += 1

    def progress(self, count: int, left: int) -> None:
        """Take note that `count` bytes arrived in this attempt, with `left` more to come.

        A drop is no progress: 64 KiB, or a sixteenth of what is left, begin the count of failures anew.
        """
        self._arrived += count
        if self._arrived >= min(_ENOUGH, max(1, left // 16)):
            self.failures = self._arrived = 0

    def fail(self, what: str, *, status: int | None = None, asked: float | None = None) -> float:
        """Count a failure of the moment.

        Args:
            what: What happened.
            status: The HTTP status, if there was one.
            asked: Seconds that the server asked to wait.

        Returns:
            Seconds to wait before the next attempt: what was asked, and the random wait besides.

        Raises:
            RateLimitedError: The server asks for a longer wait than the policy allows, or says 429 again and again.
            TransferError: There were too many failures.
        """
        self.failures += 1
        if asked is not None and asked > self.retry.rate_limit:
            shown = self._shown(status)
            raise RateLimitedError(f"the server asks to wait {asked:.0f} s ({shown})", url=self.url, hint=_HINT)
        if self.failures >= self.retry.attempts:
            if status == 429:
                shown = self._shown(status)
                raise RateLimitedError(f"the server says: too many requests ({shown})", url=self.url, hint=_HINT)
            raise self.error(what, status=status)
        return self.retry.wait(self.failures) + (asked or 0.0)

    def error(self, what: str, *, status: int | None = None) -> TransferError:
        """Return the final error, with url, status and attempts."""
        return TransferError(f"{what} ({self._shown(status)})", status=status, attempts=self.made, url=self.url)

    def _shown(self, status: int | None) -> str:
        tries = "1 attempt" if self.made == 1 else f"{self.made} attempts"
        return tries if status is None else f"status {status}, {tries}"


class HostBudget:
    """The requests of all threads to one host: how many at once, and not before when.

    It belongs to one process. A fork may copy it while another thread holds its locks, so a child needs its own: who
    keeps budgets keeps them together with the process id, and drops them all where that has changed.

    Args:
        at_once: How many requests may be under way.
    """

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._slots = threading.BoundedSemaphore(at_once)
        self._lock = threading.Lock()
        self._not_before = 0.0
        self._spacing = 0.0
        self._paced_until = 0.0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Wait until a request may begin, and hold a place while it is under way.

        Raises:
            CancelledError: The job that this thread is at was given up meanwhile.
        """
        while not self._slots.acquire(timeout=_LOOK):
            look_up()
        try:
            # With a place in hand, so that nobody begins on a permission from before somebody else was told to wait.
            while (wait := self._wait()) > 0:
                pause(wait)
            yield
        finally:
            self._slots.release()

    def try_begin(self) -> bool:
        """Take a place if a request may begin now, without waiting; `end` gives it back."""
        if not self._slots.acquire(blocking=False):
            return False
        if self._wait() > 0:
            self._slots.release()
            return False
        return True

    def end(self) -> None:
        """Give back the place of a request that is over."""
        self._slots.release()

    def hold(self, seconds: float) -> None:
        """Let no request begin for some seconds, because the server said so to one of us."""
        with self._lock:
            self._not_before = max(self._not_before, time.monotonic() + seconds)

    def pace(self, left: int, seconds: float) -> None:
        """Spread the `left` requests that a server still allows over the `seconds` until its count begins anew.

        Only when few are left: a job that stays below its quota is never slowed. And no request is put off by more than
        a minute: a server that means it says 429, and `Attempts` judges how long it may ask to wait.
        """
        now = time.monotonic()
        with self._lock:
            self._spacing = min(seconds / max(left, 1), _LONGEST_PACE) if left <= _FEW else 0.0
            self._paced_until = now + seconds
            if left == 0:
                self._not_before = max(self._not_before, now + self._spacing)

    def _wait(self) -> float:
        """Return the seconds to wait before asking again, or 0 to begin now, which the next request is put behind."""
        if not (self._not_before or self._paced_until):  # nobody was ever told to wait
            return 0.0
        now = time.monotonic()
        with self._lock:
            wait = self._not_before - now
            if wait <= 0 and now < self._paced_until:
                self._not_before = min(now + self._spacing, self._paced_until)
            return max(wait, 0.0)


def parse_retry_after(value: str, now: float) -> float | None:
    """Return the seconds that a Retry-After header asks for: a number, or a date; None if it is neither.

    Args:
        value: The header (RFC 9110, 10.2.3). All three forms of a date are read, and seconds may have a fraction.
        now: Seconds since 1970, to count a date from.
    """
    value = value.strip()
    if _SECONDS.fullmatch(value):
        return float(value)
    date = _parse_date(value)
    return None if date is None else max(0.0, date - now)


def _parse_date(value: str) -> float | None:
    try:
        date = parsedate_to_datetime(value)
        # asctime's form has no zone, and in HTTP no other zone than this.
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def parse_rate_limit(headers: Mapping[str, str], now: float | None = None) -> tuple[int, float] | None:
    """Return how many requests are left and after how many seconds the count begins anew, or None if nothing says so.

    Reads, in this order, and of several policies the one with the fewest requests left, then with the longest time:

    - ``RateLimit: "api";r=12;t=34, "pages";r=5;t=6``, draft-ietf-httpapi-ratelimit-headers-10; a policy without a time
      says nothing about when to come back, and is passed over;
    - ``RateLimit: limit=100, remaining=12, reset=34``, its version 07;
    - ``RateLimit-Remaining`` and ``RateLimit-Reset``, or the same names after ``X-``, as versions before that had it
      and many servers do. A time above a thousand million seconds is a point in time since 1970.

    What does not parse is as good as missing.

    Args:
        headers: Names in lower case.
        now: Seconds since 1970; None asks the clock.
    """
    if not _LIMITS.intersection(headers):
        return None
    found = _policies(headers.get("ratelimit", ""))
    if not found:
        for prefix in ("ratelimit", "x-ratelimit"):
            found = _counts(headers.get(f"{prefix}-remaining", ""), headers.get(f"{prefix}-reset", ""))
            if found:
                break
    if not found:
        return None
    left, seconds = min(found, key=lambda pair: (pair[0], -pair[1]))
    if seconds > 1e9:
        seconds = max(0.0, seconds - (time.time() if now is None else now))
    return left, seconds


def _policies(value: str) -> list[tuple[int, float]]:
    """Parse a RateLimit header; nothing of it counts if any of it is out of form (RFC 9651, 4.2)."""
    found: list[tuple[int, float]] = []
    at = 0
    while at < len(value):
        member = _MEMBER.match(value, at)
        if not member:
            pairs = dict(_PAIR.findall(value)) if _PAIRS.fullmatch(value) else {}
            return _counts(pairs.get("remaining", ""), pairs.get("reset", ""))
        parameters = dict(_PARAMETER.findall(member[1]))
        found += _counts(parameters.get("r", ""), parameters.get("t", ""))
        at = member.end()
    return found


def _counts(left: str, seconds: str) -> list[tuple[int, float]]:
    left, seconds = left.strip(), seconds.strip()
    return [(int(left), float(seconds))] if _COUNT.fullmatch(left) and _COUNT.fullmatch(seconds) else []


def asked_wait(status: int, headers: Mapping[str, str], now: float) -> float | None:
    """Return the seconds that an answer asks to wait before the next request, or None.

    A 429 whose RateLimit says that nothing is left waits until the count begins anew, and a second more. Otherwise it
    is what Retry-After says; a date there is compared with the server's own clock where the answer tells it (Date).

    Args:
        status: The HTTP status.
        headers: Names in lower case.
        now: Seconds since 1970.
    """
    limit = parse_rate_limit(headers, now)
    if status == 429 and limit is not None and limit[0] == 0:
        return limit[1] + 1
    if "retry-after" not in headers:
        return None
    there = _parse_date(headers.get("date", ""))
    return parse_retry_after(headers["retry-after"], now if there is None else there)
