"""What a migration did and how long each part of it took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One phase of a run. `start_s` is in seconds of the Unix clock, so that spans of several workers line up."""

    name: str
    start_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Bytes of old state, new state and staging that a worker holds; `at_s` in seconds of the Unix clock."""

    at_s: float
    held_bytes: int


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """The migration report: what one worker did in a run. Bytes are payload; `referred_bytes` never left the worker.
    `timeline` says what it held and when."""

    seconds: float
    sent_bytes: int
    received_bytes: int
    referred_bytes: int
    num_rounds: int
    spans: tuple[Span, ...]
    timeline: tuple[MemoryPoint, ...] = ()


class SpanRecorder:
    """Collects spans. Durations come from the monotonic clock, starts from one reading of the Unix clock."""

    def __init__(self) -> None:
        self._origin_s = time.time() - time.perf_counter()
        self.spans: list[Span] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(name, self._origin_s + start, time.perf_counter() - start))
