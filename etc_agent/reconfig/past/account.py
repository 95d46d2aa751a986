"""The job's account: sums over its history, as an administrator's graphs and alerts need them.

Every agent can work them out from the records, so they survive any agent and any change of leader, and nothing is
counted twice. What is removed from the history (`past.tidy`) is added to the key ``account`` by the same write.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Self

from etc_agent.parallel.generation import Trigger
from etc_agent.reconfig.known.records import History

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of a distribution's classes; the last class has none."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """How many durations fell into each class of `BOUNDS_S`, and their sum in seconds."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    sum_s: float = 0.0

    @classmethod
    def of(cls, durations_s: Iterable[float]) -> Self:
        counts, sum_s = [0] * (len(BOUNDS_S) + 1), 0.0
        for seconds in durations_s:
            counts[bisect_left(BOUNDS_S, seconds)] += 1
            sum_s += seconds
        return cls(tuple(counts), sum_s)

    def __add__(self, other: Distribution) -> Distribution:
        pairs = zip(self.counts, other.counts, strict=True)
        return Distribution(tuple(a + b for a, b in pairs), self.sum_s + other.sum_s)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def cumulative(self) -> tuple[tuple[float, int], ...]:
        """(upper bound, how many durations are at most that), as Prometheus counts; the last bound is infinite."""
        return tuple(zip((*BOUNDS_S, float("inf")), accumulate(self.counts), strict=True))


@dataclass(frozen=True, slots=True)
class Account:
    """`changes`: (outcome, trigger) -> how many generations of the history. `restarts`: trigger -> how many times all
    workers were started afresh; the start of the job is none. `moved_bytes`: received by workers in migrations.
    `stops`: stop times of planned changes. `recoveries`: of those in which a loss was handled in place. `phases`: phase
    of a preparation or a switch -> its durations, those of the slowest worker of each change.
    """

    changes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    moved_bytes: int = 0
    stops: Distribution = Distribution()
    recoveries: Distribution = Distribution()
    phases: Mapping[str, Distribution] = field(default_factory=dict)

    @classmethod
    def of(cls, history: Iterable[History]) -> Self:
        records = list(history)
        phases: dict[str, list[float]] = {}
        for record in records:
            named = [(f"prepare_{name}", ms) for name, ms in record.prepare_ms.items()]
            for name, ms in (*named, *record.phases_ms.items()):
                phases.setdefault(name, []).append(ms / 1e3)
        return cls(
            Counter((record.outcome, str(record.trigger)) for record in records),
            Counter(str(record.trigger) for record in records if record.is_restart),
            sum(record.moved_bytes for record in records),
            _stops(record for record in records if not record.trigger.is_loss),
            _stops(record for record in records if record.trigger.is_loss),
            {name: Distribution.of(durations_s) for name, durations_s in phases.items()},
        )

    @property
    def losses(self) -> Mapping[str, int]:
        """Trigger -> how many losses the job has gone on from, in place or by a restart."""
        return {
            trigger: count for (outcome, trigger), count in self.changes.items()
            if outcome == "committed" and Trigger(trigger).is_loss
        }

    def __add__(self, other: Account) -> Account:
        names = {*self.phases, *other.phases}
        nothing = Distribution()
        return Account(
            Counter(self.changes) + Counter(other.changes),
            Counter(self.restarts) + Counter(other.restarts),
            self.moved_bytes + other.moved_bytes,
            self.stops + other.stops,
            self.recoveries + other.recoveries,
            {name: self.phases.get(name, nothing) + other.phases.get(name, nothing) for name in names},
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "changes": [[*key, count] for key, count in self.changes.items()],
            "restarts": dict(self.restarts),
            "moved_bytes": self.moved_bytes,
            "stops": _listed(self.stops),
            "recoveries": _listed(self.recoveries),
            "phases": {name: _listed(durations) for name, durations in self.phases.items()},
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(
            {(outcome, trigger): count for outcome, trigger, count in value["changes"]},
            value["restarts"],
            value["moved_bytes"],
            _distribution(value["stops"]),
            _distribution(value["recoveries"]) if "recoveries" in value else Distribution(),
            {name: _distribution(listed) for name, listed in value["phases"].items()},
        )


def _stops(records: Iterable[History]) -> Distribution:
    return Distribution.of(record.stop_ms / 1e3 for record in records if record.stop_ms is not None)


def _listed(durations: Distribution) -> list[Any]:
    return [list(durations.counts), durations.sum_s]


def _distribution(listed: list[Any]) -> Distribution:
    counts, sum_s = listed
    return Distribution(tuple(counts), sum_s)
