"""The progress of a training job."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Course:
    """`step`: the next step, or the one being run. `num_steps`: the number of steps of the whole job. `began`, `ended`:
    when the last step began and ended (`time.perf_counter`). `step_s`: seconds that the last step took, with what the
    script did between it and the one before; a change in between does not count. `pace_s`: the same on average over
    the steps that `tell` has last reported."""

    step: int = 0
    num_steps: int = 0
    began: float = field(default_factory=time.perf_counter)
    ended: float = field(default_factory=time.perf_counter)
    step_s: float = 0.0
    pace_s: float = 0.0
    _untold: int = 0
    _untold_s: float = 0.0
    _is_first: bool = True
    _between_s: float = 0.0

    def reach_safe_point(self) -> None:
        self._between_s = 0.0 if self._is_first else time.perf_counter() - self.ended

    def begin_step(self) -> None:
        self.began = time.perf_counter()

    def end_step(self) -> None:
        self.step += 1
        self.ended = time.perf_counter()
        self.step_s = self._between_s + self.ended - self.began
        self._untold += 1
        self._untold_s += self.step_s
        self._is_first = False

    def tell(self) -> float:
        """Seconds that a step took, on average over those since the last call; without one, as told before."""
        if self._untold:
            self.pace_s, self._untold, self._untold_s = self._untold_s / self._untold, 0, 0.0
        return self.pace_s

    def stand_still(self) -> None:
        """No step was run: the time until now counts for none."""
        self.began = self.ended = time.perf_counter()
        self._is_first = True
