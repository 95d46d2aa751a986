"""The progress of a training job."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Course:
    """`step`: the next step, or the one being run. `num_steps`: the number of steps of the whole job. `began`, `ended`:
    when the last step began and ended (`time.perf_counter`)."""

    step: int = 0
    num_steps: int = 0
    began: float = field(default_factory=time.perf_counter)
    ended: float = field(default_factory=time.perf_counter)

    def begin_step(self) -> None:
        self.began = time.perf_counter()

    def end_step(self) -> None:
        self.step += 1
        self.ended = time.perf_counter()

    def stand_still(self) -> None:
        """No step was run: the time until now counts for none."""
        self.began = self.ended = time.perf_counter()
