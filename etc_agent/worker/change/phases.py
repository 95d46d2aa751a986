"""The duration of each phase of a switch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from etc_agent.migration.report import Span


class Phases:
    """Phase -> milliseconds, for the phases that have ended; `spans` also has their starts, and those of the
    migration."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self.spans: list[Span] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began_s, start = time.time(), time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.ms[name] = seconds * 1e3
        self.spans.append(Span(name, began_s, seconds))
