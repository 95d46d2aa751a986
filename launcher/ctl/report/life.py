"""A job's life from its records: which generation trained when, on which nodes, what it cost, what went wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from etc_agent.parallel.generation import Generation
from etc_agent.reconfig.known.records import History
from etc_agent.reconfig.past.account import Account
from launcher.ctl.exits import CtlError, Exit
from launcher.ctl.job.jobs import Job


@dataclass(frozen=True, slots=True)
class Span:
    """From `begin` to `end`, in seconds since 1970."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Era:
    """The time in which one generation was in force. `workers`: how many; 0 where the job held its state without
    training."""

    record: History
    span: Span
    workers: int
    nodes: tuple[str, ...]

    @property
    def is_failure(self) -> bool:
        """Whether a loss led to it."""
        return self.record.trigger.is_loss


@dataclass(frozen=True, slots=True)
class Event:
    """One line of an events file (docs/metrics.md). `said`: its own fields, for people."""

    time: float
    node: str
    kind: str
    said: str


@dataclass(frozen=True, slots=True)
class Life:
    """A job's whole life, as far as its records and events tell.

    `eras`: what was in force, in order. `withdrawn`: proposed generations that never were. `presence`: node -> when it
    had workers. `account`: of all generations, those included whose records are gone already.
    """

    job: Job
    span: Span
    eras: tuple[Era, ...]
    withdrawn: tuple[History, ...]
    presence: Mapping[str, tuple[Span, ...]]
    account: Account
    trained_s: float | None
    events: tuple[Event, ...] = field(default=())

    @property
    def goodput(self) -> float | None:
        """The share of its life that the job has spent in steps which were completed for the first time."""
        if self.trained_s is None or self.span.seconds <= 0:
            return None
        return min(1.0, self.trained_s / self.span.seconds)

    @property
    def changes(self) -> tuple[Era, ...]:
        """The changes whose stop time was measured."""
        return tuple(era for era in self.eras if era.record.stop_ms is not None)

    @property
    def failures(self) -> tuple[Era, ...]:
        return tuple(era for era in self.eras if era.is_failure)

    @property
    def troubles(self) -> tuple[History, ...]:
        """What went wrong, in order: losses and failures, and changes that were withdrawn."""
        records = (*(era.record for era in self.failures), *self.withdrawn)
        return tuple(sorted(records, key=lambda record: record.time))

    @property
    def stopped_s(self) -> float:
        """All stop times together, restarts not included."""
        return self.account.stops.sum_s + self.account.recoveries.sum_s

    @property
    def median_stop_s(self) -> float | None:
        stops = [era.record.stop_ms / 1000 for era in self.changes if era.record.stop_ms is not None]
        return median(stops) if stops else None


def life_of(
    job: Job, history: Sequence[History], generations: Sequence[Generation], events: Iterable[Event], now: float
) -> Life:
    """The life of `job`; it lasts until `now` where it has not ended."""
    known = {generation.id: generation for generation in generations}
    committed = [record for record in history if record.outcome == "committed"]
    first = min((record.time for record in committed if record.time), default=now)
    begin = min(float(job.rules.get("started") or first), first)
    told_at = float(job.status.get("time") or 0.0)
    latest = max((record.time for record in history), default=begin)
    end = max(latest, told_at, begin) if job.state.has_ended or not job.nodes else max(now, latest)
    starts = [max(begin, record.time) for record in committed]
    spans = (Span(start, until) for start, until in pairwise([*starts, end]))
    eras = tuple(
        _era(record, known.get(record.generation), span) for record, span in zip(committed, spans, strict=True)
    )
    goodput = job.records.goodput
    return Life(
        job, Span(begin, end), eras, tuple(record for record in history if record.outcome != "committed"),
        _presence(eras), job.records.account + Account.of(history), goodput.trained_s if goodput is not None else None,
        tuple(sorted(events, key=lambda event: event.time)),
    )


def _era(record: History, generation: Generation | None, span: Span) -> Era:
    if generation is None:
        return Era(record, span, 0, ())
    return Era(record, span, 0 if generation.is_held else generation.config.num_ranks, generation.nodes)


def _presence(eras: Iterable[Era]) -> dict[str, tuple[Span, ...]]:
    """Node -> the spans in which it had workers; spans that touch are one."""
    found: dict[str, list[Span]] = {}
    for era in eras:
        for node in era.nodes:
            spans = found.setdefault(node, [])
            if spans and spans[-1].end == era.span.begin:
                spans[-1] = Span(spans[-1].begin, era.span.end)
            else:
                spans.append(era.span)
    return {node: tuple(spans) for node, spans in found.items()}


def read_events(paths: Iterable[Path], run_id: str) -> list[Event]:
    """The events of one job in files that ``etc-run --events`` has written, one for each node or several: what every
    agent tells of the whole job is taken once.

    Raises:
        CtlError: a file cannot be read, or a line of it is no event.
    """
    found: dict[str, Event] = {}
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise CtlError(Exit.MISTAKE, f"--events: {path} cannot be read: {reason}") from None
        for number, line in enumerate(lines, 1):
            try:
                fields = json.loads(line)
                event = _event(fields)
                is_ours = fields.get("run_id") == run_id
            except (ValueError, TypeError, KeyError, AttributeError):
                raise CtlError(Exit.MISTAKE, f"--events: {path}, line {number}: not an event of etc-run") from None
            if is_ours:
                same = found.setdefault(f"{event.kind} {event.said}", event)
                if event.time < same.time:
                    found[f"{event.kind} {event.said}"] = event
    return list(found.values())


def _event(fields: dict[str, Any]) -> Event:
    own = {name: value for name, value in fields.items() if name not in ("time", "run_id", "node", "event")}
    said = ", ".join(f"{name} {_short(value)}" for name, value in own.items() if value not in (None, "", [], {}))
    return Event(float(fields["time"]), str(fields["node"]), str(fields["event"]), said)


def _short(value: Any, most: int = 200) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= most else text[: most - 3] + "..."
