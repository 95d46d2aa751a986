"""What a job's account of itself must say, whatever was done to it.

A *life* is a fresh generation with all that came from it in place. A life that begins with a checkpoint takes the place
of what earlier lives did from that step on; what remains is the lineage of the final state.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation

_TOLERANCE_S = 0.25
"""By how much the clocks of two lines of the account may mislead: a line is written after the step that it tells of."""


@dataclass(frozen=True, slots=True)
class Line:
    """One rank's account of one step; `seen`, `updates`: how many steps its state had been through after it."""

    step: int
    generation: int
    config: str
    rank: int
    dp: int
    ids: tuple[int, ...]
    loss: float
    seen: tuple[int, ...]
    updates: tuple[int, ...]
    pid: int
    time: float


class Account:
    """All lines of all workers, read as they come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = defaultdict(int)
        self.lines: list[Line] = []

    def read(self) -> list[Line]:
        """Every line so far. What a killed worker left unfinished is not a line."""
        for path in self._folder.glob("steps-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets[path])
                for raw in file:
                    if not raw.endswith(b"\n"):
                        break
                    self._offsets[path] += len(raw)
                    self.lines.append(_line(json.loads(raw)))
        return self.lines


def _line(value: dict[str, Any]) -> Line:
    return Line(**{name: tuple(item) if isinstance(item, list) else item for name, item in value.items()})


@dataclass(slots=True)
class Findings:
    """`steps_lost_planned`: steps done twice or not at all at a change in place. `steps_repeated`: done again after a
    restart from a checkpoint, over all restarts. `wrong`: what must not be, one line each."""

    num_steps: int = 0
    steps_lost_planned: int = 0
    steps_repeated: int = 0
    lives: int = 0
    wrong: list[str] = field(default_factory=list)


def examine(lines: Iterable[Line], generations: Mapping[int, Generation], global_batch: int) -> Findings:
    """Check the account of a whole run against the generations that there were. `global_batch`: samples per step."""
    found = Findings()
    lives: dict[int, list[Line]] = defaultdict(list)
    fresh = sorted(number for number, generation in generations.items() if generation.is_fresh)
    for line in lines:
        lives[max(number for number in fresh if number <= line.generation)].append(line)
    found.lives = len(lives)
    lineage: dict[int, list[Line]] = {}
    last_before = -1
    for life in sorted(lives):
        steps: dict[int, list[Line]] = defaultdict(list)
        for line in lives[life]:
            steps[line.step].append(line)
        begin = min(steps)
        if begin > last_before + 1:
            found.wrong.append(f"generation {life} begins with step {begin}; only {last_before} steps were done before")
        found.steps_repeated += last_before + 1 - begin if lineage else 0
        lineage = {step: done for step, done in lineage.items() if step < begin} | steps
        last_before = max(steps)
        found.steps_lost_planned = max(found.steps_lost_planned, _lost_in_place(life, steps, found.wrong))
    _check_overlap(lives, found.wrong)
    found.num_steps = len(lineage)
    if set(lineage) != set(range(len(lineage))):
        found.wrong.append(f"steps are missing: {sorted(set(range(max(lineage))) - set(lineage))[:5]}")
    last = max(lineage, default=0)
    for step, done in lineage.items():
        if step < last:  # the very last step of a run that is stopped need not be whole
            _check_step(step, done, global_batch, found.wrong)
    return found


def _lost_in_place(life: int, steps: Mapping[int, list[Line]], wrong: list[str]) -> int:
    """The most steps done twice or left out between two generations of one life."""
    bounds: dict[int, tuple[int, int]] = {}
    for step, done in steps.items():
        for line in done:
            first, last = bounds.get(line.generation, (step, step))
            bounds[line.generation] = (min(first, step), max(last, step))
    worst, ordered = 0, sorted(bounds)
    for before, after in pairwise(ordered):
        lost = abs(bounds[after][0] - bounds[before][1] - 1)
        if lost:
            wrong.append(f"generation {after} goes on with step {bounds[after][0]} after {bounds[before][1]} ({life=})")
        worst = max(worst, lost)
    return worst


def _check_overlap(lives: Mapping[int, list[Line]], wrong: list[str]) -> None:
    """The workers of one life have stopped before the next one's first step ends."""
    ordered = sorted(lives)
    for before, after in pairwise(ordered):
        begin = min(line.time for line in lives[after])
        late = [line for line in lives[before] if line.time > begin + _TOLERANCE_S]
        if late:
            newest = max(line.time for line in late)
            wrong.append(
                f"{len(late)} steps of generation {before} by pids {sorted({line.pid for line in late})} ended up to "
                f"{newest - begin:.1f} s after the first of generation {after}"
            )


def _check_step(step: int, done: list[Line], global_batch: int, wrong: list[str]) -> None:
    """One generation, every rank once, every sample once, and a state that has seen every step before it."""
    if len({line.generation for line in done}) != 1:
        wrong.append(f"step {step} was done in generations {sorted({line.generation for line in done})}")
        return
    config = ParallelConfig.parse(done[0].config)
    if sorted(line.rank for line in done) != list(range(config.num_ranks)):
        wrong.append(f"step {step} (generation {done[0].generation}) was done by ranks {sorted(x.rank for x in done)}")
        return
    by_dp = {line.dp: line.ids for line in done}
    ids = sorted(sample for part in by_dp.values() for sample in part)
    if ids != list(range(step * global_batch, (step + 1) * global_batch)):
        wrong.append(f"step {step} trained on samples {ids}")
    if any(line.ids != by_dp[line.dp] for line in done):
        wrong.append(f"step {step}: two ranks of one dp index trained on different samples")
    counts = {line.seen for line in done} | {line.updates for line in done}
    if counts != {(step + 1,)}:
        wrong.append(f"step {step}: the state has been through {sorted(counts)} steps")
    if len({line.loss for line in done}) != 1:
        wrong.append(f"step {step}: the ranks disagree about its loss: {sorted({line.loss for line in done})}")
