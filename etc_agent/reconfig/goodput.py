"""For how long the job has trained, of the time that it has lived.

The leader keeps this in ``status``. It counts steps, not time, so a new leader that reads it goes on where the one
before stopped, and a step that is run twice counts once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Goodput:
    """`since`: when the job began, in seconds since 1970. `trained_s`: the steps that were completed for the first
    time, each with the time that a step took then. `step`: the furthest next step so far; None before the first."""

    since: float
    trained_s: float = 0.0
    step: int | None = None

    def at(self, now: float, step: int, step_s: float) -> Goodput:
        """The job is about to run `step`, and its last step took `step_s` seconds; `now`: in seconds since 1970."""
        if self.step is None:
            return replace(self, step=step)
        new = max(0, step - self.step)
        most_s = max(self.trained_s, now - self.since)
        return replace(self, trained_s=min(self.trained_s + new * step_s, most_s), step=self.step + new)

    def life_s(self, now: float) -> float:
        """Seconds since the job began; never less than what it has trained, although two nodes' clocks may differ."""
        return max(now - self.since, self.trained_s)

    def to_json(self) -> dict[str, Any]:
        return {"since": self.since, "trained_s": round(self.trained_s, 3), "step": self.step}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(float(value["since"]), float(value["trained_s"]), value["step"])
