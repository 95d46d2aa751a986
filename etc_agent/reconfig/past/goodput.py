"""For how long the job has trained, of the time that it has lived.

The leader keeps this in ``status``. It counts steps, not time, so a new leader that reads it goes on where the one
before stopped, and a step that is run twice counts once. As workers tell their step once a second, a few steps may be
missing where the job has gone back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Goodput:
    """`since`: when the job began, in seconds since 1970. `trained_s`: the steps that were completed for the first
    time, each with the time that a step took then. `step`: the furthest next step so far, `last`: the last one told;
    None before the first. `generation`: the one in which `last` was told. `redone`: completed steps that the job went
    back over."""

    since: float
    trained_s: float = 0.0
    step: int | None = None
    last: int | None = None
    redone: int = 0
    generation: int = 0

    def at(self, now: float, generation: int, step: int, step_s: float) -> Goodput:
        """The job is about to run `step` in `generation`, and a step took `step_s` seconds lately, on average; `now`:
        in seconds since 1970. Another worker than before may tell an earlier step of the same generation: nobody has
        gone back then."""
        if self.step is None or self.last is None:
            return replace(self, step=step, last=step, generation=generation)
        if (generation, step) < (self.generation, self.last):
            return self
        new, back = max(0, step - self.step), max(0, self.last - step)
        most_s = max(self.trained_s, now - self.since)
        trained_s = min(self.trained_s + new * step_s, most_s)
        return replace(
            self, trained_s=trained_s, step=self.step + new, last=step, redone=self.redone + back, generation=generation
        )

    def life_s(self, now: float) -> float:
        """Seconds since the job began; never less than what it has trained, although two nodes' clocks may differ."""
        return max(now - self.since, self.trained_s)

    def to_json(self) -> dict[str, Any]:
        told = {"since": self.since, "trained_s": round(self.trained_s, 3), "step": self.step}
        return {**told, "last": self.last, "redone": self.redone, "generation": self.generation}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        last, redone = value.get("last", value["step"]), value.get("redone", 0)
        since, trained_s = float(value["since"]), float(value["trained_s"])
        return cls(since, trained_s, value["step"], last, redone, value.get("generation", 0))
