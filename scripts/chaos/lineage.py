"""What a job's account of itself must say, whatever was done to it.

A *life* is a fresh generation with all that came from it in place. A life that begins with a checkpoint takes the place
of what earlier lives did from that step on; what remains is the lineage of the final state. A life may only end, before
the job does, where a part of the state had no living holder any more. Where workers keep copies of each other's state,
a recovery may go back to an earlier step of the same life, which takes the place of what was done from there on: only
where nobody else held what was lost.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
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
    """One rank's account of one step; `seen`, `updates`: how many steps its state had been through after it.
    `is_retried`: workers were lost in it, so that it was not applied, but run again."""

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
    is_retried: bool = False


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
    restart from a checkpoint, over all restarts. `steps_redone`: those that were under way when workers were lost, and
    run again; `redone_max`: the most of them in one generation. `steps_gone_back`: done again from copies in memory,
    over all recoveries; `gone_back_max`: in one of them. `needless_restarts`: restarts although every part of
    the state had a living holder. `wrong`: what must not be, one line each."""

    num_steps: int = 0
    steps_lost_planned: int = 0
    steps_repeated: int = 0
    steps_redone: int = 0
    redone_max: int = 0
    steps_gone_back: int = 0
    gone_back_max: int = 0
    needless_restarts: int = 0
    lives: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Excuses:
    """What explains that workers end or steps are done again. `deaths`: pid -> when (time of day) that worker was
    killed or made to hang, by us. `fenced`: from when to when every node may have stopped its workers, since etcd was
    away and another node silent. `copies_every`: steps between two copy sets, 0 where none are made."""

    deaths: Mapping[int, float] = field(default_factory=dict)
    fenced: tuple[tuple[float, float], ...] = ()
    copies_every: int = 0

    def is_fenced(self, at: float) -> bool:
        return any(begin <= at <= end for begin, end in self.fenced)

    def has_died(self, pid: int, by: float) -> bool:
        return self.deaths.get(pid, by) < by


def examine(
    lines: Iterable[Line], generations: Mapping[int, Generation], global_batch: int, excuses: Excuses
) -> Findings:
    """Check the account of a whole run against the generations that there were. `global_batch`: samples per step."""
    deaths = excuses.deaths
    found = Findings()
    lives: dict[int, list[Line]] = defaultdict(list)
    fresh = sorted(number for number, generation in generations.items() if generation.is_fresh)
    every = list(lines)
    _check_retries([line for line in every if line.is_retried], found)
    for line in every:
        if line.is_retried:
            continue
        lives[max(number for number in fresh if number <= line.generation)].append(line)
    found.lives = len(lives)
    for life, told in lives.items():
        lives[life] = _without_what_was_gone_back_over(told, generations, excuses, found)
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
    _check_restarts(lives, generations, excuses, found)
    for life in lives.values():
        _check_survivors(life, generations, deaths, found.wrong)
    found.num_steps = len(lineage)
    if set(lineage) != set(range(len(lineage))):
        found.wrong.append(f"steps are missing: {sorted(set(range(max(lineage))) - set(lineage))[:5]}")
    last = max(lineage, default=0)
    pids = {(line.generation, line.rank): line.pid for done in lineage.values() for line in done}
    killed = {who for who, pid in pids.items() if pid in deaths}
    for step, done in lineage.items():
        if step < last:  # the very last step of a run that is stopped need not be whole
            _check_step(step, done, global_batch, killed, found.wrong)
    return found


def _check_retries(retried: Iterable[Line], found: Findings) -> None:
    """A loss ends a generation, and at most the step that was under way is run again."""
    steps: dict[int, set[int]] = defaultdict(set)
    for line in retried:
        steps[line.generation].add(line.step)
    found.steps_redone = sum(map(len, steps.values()))
    found.redone_max = max(map(len, steps.values()), default=0)
    found.wrong += [
        f"generation {number}: steps {sorted(several)} were all run again"
        for number, several in steps.items() if len(several) > 1
    ]


def _without_what_was_gone_back_over(
    life: list[Line], generations: Mapping[int, Generation], excuses: Excuses, found: Findings
) -> list[Line]:
    """The lines of a life without the steps that a recovery from copies has done again."""
    kept: list[Line] = []
    for number in sorted({line.generation for line in life}):
        told = [line for line in life if line.generation == number]
        begin, end = min(line.step for line in told), max((line.step for line in kept), default=-1) + 1
        if excuses.copies_every and begin < end and kept:
            last = max(line.generation for line in kept)
            is_recovery = any(generations[each].lost for each in range(last + 1, number + 1) if each in generations)
            living = _living(kept, last, generations, excuses, min(line.time for line in told))
            if is_recovery and not _is_whole(living, generations[last]):
                kept = [line for line in kept if line.step < begin]
                found.steps_gone_back += end - begin
                found.gone_back_max = max(found.gone_back_max, end - begin)
        kept += told
    return kept


def _living(
    life: Iterable[Line], number: int, generations: Mapping[int, Generation], excuses: Excuses, at: float
) -> set[int]:
    """The ranks of generation `number` whose workers had not been killed at that time."""
    pids = {line.rank: line.pid for line in life if line.generation == number}
    return {rank for rank, pid in pids.items() if not excuses.has_died(pid, at)}


def _is_whole(ranks: Set[int], generation: Generation) -> bool:
    """Whether these ranks hold every part of the state."""
    config = generation.config
    parts = {(config.coordinate(rank).pp, config.coordinate(rank).tp) for rank in ranks}
    return len(parts) == config.pp * config.tp


def _are_covered(lines: Iterable[Line], living: Set[int], generation: Generation, excuses: Excuses) -> bool:
    """Whether copies in the memory of others cover what the ranks that do not live held: those of one node, and the
    generation had the time for a few complete sets."""
    lost = {generation.placement[rank].node for rank in range(generation.config.num_ranks) if rank not in living}
    steps = {line.step for line in lines if line.generation == generation.id}
    return bool(excuses.copies_every and living) and len(lost) == 1 and len(steps) > 3 * excuses.copies_every


def _check_restarts(
    lives: Mapping[int, list[Line]], generations: Mapping[int, Generation], excuses: Excuses, found: Findings,
) -> None:
    """A life may only end where some part of the state was on no living worker."""
    for before, after in pairwise(sorted(lives)):
        last = max(line.generation for line in lives[before])
        config = generations[last].config
        begun = min(line.time for line in lives[after])
        if excuses.is_fenced(begun):
            continue
        living = _living(lives[before], last, generations, excuses, begun)
        is_covered = _are_covered(lives[before], living, generations[last], excuses)
        if _is_whole(living, generations[last]) or is_covered:
            found.needless_restarts += 1
            found.wrong.append(
                f"generation {after} began anew ({generations[after].reason}), although ranks {sorted(living)} of "
                f"generation {last}, {config}, lived and held the whole state{' or copies of it' * is_covered}"
            )


def _check_survivors(
    life: Iterable[Line], generations: Mapping[int, Generation], deaths: Mapping[int, float], wrong: list[str]
) -> None:
    """Who stays in its slot from one generation to the next stays in its process."""
    pids: dict[int, dict[Any, int]] = defaultdict(dict)
    for line in life:
        pids[line.generation][generations[line.generation].placement[line.rank]] = line.pid
    for before, after in pairwise(sorted(pids)):
        for slot in pids[before].keys() & pids[after].keys():
            old, new = pids[before][slot], pids[after][slot]
            if old != new and old not in deaths:
                wrong.append(f"{slot}: pid {old} of generation {before} became {new} in {after}; nobody had killed it")


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


def _check_step(
    step: int, done: list[Line], global_batch: int, killed: Set[tuple[int, int]], wrong: list[str]
) -> None:
    """One generation, every rank once, every sample once, and a state that has seen every step before it. Of ranks that
    were `killed` (generation, rank) there may be no account."""
    if len({line.generation for line in done}) != 1:
        wrong.append(f"step {step} was done in generations {sorted({line.generation for line in done})}")
        return
    config = ParallelConfig.parse(done[0].config)
    ranks = sorted(line.rank for line in done)
    missing = {(done[0].generation, rank) for rank in set(range(config.num_ranks)) - set(ranks)}
    if len(set(ranks)) < len(ranks) or not missing <= killed:
        wrong.append(f"step {step} (generation {done[0].generation}) was done by ranks {ranks}")
        return
    share = global_batch // config.dp
    for line in done:
        first = step * global_batch + line.dp * share
        if line.ids != tuple(range(first, first + share)):
            wrong.append(f"step {step} trained on samples {list(line.ids)} at dp index {line.dp}")
            break
    counts = {line.seen for line in done} | {line.updates for line in done}
    if counts != {(step + 1,)}:
        wrong.append(f"step {step}: the state has been through {sorted(counts)} steps")
    if len({line.loss for line in done}) != 1:
        wrong.append(f"step {step}: the ranks disagree about its loss: {sorted({line.loss for line in done})}")
