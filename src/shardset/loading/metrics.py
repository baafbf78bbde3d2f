"""What a loader has done, and what it waited for."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a loader has done since it was made, on this rank.

    Attributes:
        samples: Samples given.
        bytes: Bytes of their payloads that were read ahead from stores; those of mapped shards are not counted.
        reads: In how many reads, as planned.
        batches: Batches given.
        seconds: Since the first batch was asked for.
        waited_for_storage: Seconds in which a batch was asked for and its bytes were not here.
        waited_for_decode: Seconds in which a batch was asked for and it was being decoded.
        waited_for_consumer: Seconds in which nobody asked for a batch.
        skipped: How many samples were skipped, substituted or given with defaults, by reason.
    """

    samples: int = 0
    bytes: int = 0
    reads: int = 0
    batches: int = 0
    seconds: float = 0.0
    waited_for_storage: float = 0.0
    waited_for_decode: float = 0.0
    waited_for_consumer: float = 0.0
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float:
        """Samples a second, the time of the consumer included."""
        return self.samples / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        waits = {
            "storage": self.waited_for_storage,
            "decode": self.waited_for_decode,
            "consumer": self.waited_for_consumer,
        }
        shares = ", ".join(f"{name} {share / self.seconds:.0%}" for name, share in waits.items() if self.seconds)
        text = f"{self.samples:,} samples, {self.samples_per_second:,.0f}/s; waited for {shares or 'nothing yet'}"
        if self.bytes:
            text += f"; {self.bytes / 1e6:,.0f} MB in {self.reads:,} reads"
        if self.skipped:
            text += "; " + ", ".join(f"{code}: {count}" for code, count in self.skipped.items())
        return text


class Meter:
    """Measures one loader; only the thread that asks for batches writes to it."""

    def __init__(self) -> None:
        self.samples = self.bytes = self.reads = self.batches = 0
        self.storage = self.decode = self.consumer = 0.0
        self._started: float | None = None
        self._ended = 0.0
        self._given: float | None = None

    def ask(self) -> None:
        """Note that a batch is asked for."""
        now = time.perf_counter()
        if self._started is None:
            self._started = now
        elif self._given is not None:
            self.consumer += now - self._given
        self._given = None

    def give(self, samples: int) -> None:
        """Note that a batch is given."""
        self.samples += samples
        self.batches += 1
        self._given = self._ended = time.perf_counter()

    def metrics(self, skipped: Mapping[str, int]) -> Metrics:
        """Return what was measured until the batch given last."""
        seconds = self._ended - self._started if self._started is not None and self._ended else 0.0
        return Metrics(
            self.samples,
            self.bytes,
            self.reads,
            self.batches,
            seconds,
            self.storage,
            self.decode,
            self.consumer,
            dict(skipped),
        )


class ProgressLine:
    """One line on a terminal, or a line now and then elsewhere, that says how far an epoch is."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._next = 0.0

    def show(self, epoch: int, step: int, steps: int | None, metrics: Metrics, *, last: bool = False) -> None:
        """Show a state of affairs, if it is time to."""
        stream = self._stream or sys.stderr
        now = time.monotonic()
        is_terminal = stream.isatty()
        if now < self._next and not last:
            return
        self._next = now + (0.5 if is_terminal else 30.0)
        of = f"/{steps:,}" if steps is not None else ""
        line = f"epoch {epoch}, step {step:,}{of}: {metrics}"
        stream.write(f"\r{line}\x1b[K" + ("\n" if last else "") if is_terminal else line + "\n")
        stream.flush()
