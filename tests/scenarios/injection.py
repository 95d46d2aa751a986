"""A job whose workers die at chosen points: what is done to it, and what its own account must say afterwards."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from running import Etcd, EtcRun, wait_until

from etc_agent.parallel.config import ParallelConfig
from tests.worker.injected_job import Death
from tests.worker.replay import Leg, Line, differences, legs_of, lines_of, replay

ROOT = Path(__file__).resolve().parents[2]
INJECTED_JOB = ROOT / "tests" / "worker" / "injected_job.py"
AHEAD = 12
"""Steps between the moment in which a death is written down and the one in which it happens."""


class RestartedError(AssertionError):
    """All workers were started anew, from the first step."""


@dataclass
class InjectedRun:
    """A running job of `injected_job`. `dead`: the pids of workers that had trained and were killed, with what killed
    them, in that order. `num_deaths`: those of joiners included."""

    folder: Path
    job: EtcRun
    etcd: Etcd
    full: str
    dead: dict[int, str] = field(default_factory=dict)
    num_deaths: int = 0

    def lines(self) -> list[Line]:
        return lines_of(self.folder)

    def settle(self, config: str | None = None) -> int:
        """Wait until every rank of `config` (by default the full one) trains and no change is under way. Returns the
        number of its generation.

        Raises:
            RestartedError: all workers were restarted.
        """
        wanted = str(ParallelConfig.parse(config or self.full))

        def settled() -> int:
            current = self.etcd.get("current") or {}
            committed = current.get("committed", 0)
            if committed > 1 and not (record := self.etcd.get(f"generations/{committed}"))["previous"]:
                raise RestartedError(f"generation {committed} is a fresh one: {record['reason']}")
            assert not current.get("outcome"), f"the job ended: {current['why']}"
            if not committed or current.get("loss") or current["proposed"]:
                return 0
            lines = [line for line in self.lines() if line["generation"] == committed and "retried" not in line]
            if any(line["pid"] in self.dead for line in lines):
                return 0
            ranks = [line["rank"] for line in lines]
            is_whole = bool(lines) and lines[0]["config"] == wanted
            counts = [ranks.count(rank) for rank in range(ParallelConfig.parse(wanted).num_ranks)]
            return committed if is_whole and min(counts) >= 2 else 0

        try:
            return int(wait_until(settled, f"{wanted} to train", 90.0))
        except AssertionError as error:
            raise type(error)(f"{error}; current: {self.etcd.get('current')}; {self.job.output[-6000:]}") from None

    def die_in_step(self, death: Death) -> None:
        """Have it happen some steps from now, and wait until it has."""
        generation = self.settle()
        lines = self.lines()
        pids = {line["rank"]: line["pid"] for line in lines if line["generation"] == generation}
        step = lines[-1]["step"] + AHEAD
        death.write(self.folder, step)
        self._await_death(f"die-{step}.json", f"a death in step {step}")
        victims = [pid for pid in death.pids if pid in pids.values()] or [pids[death.who]]
        self._bury({pid: f"{death.point} in step {step}" for pid in victims})

    def die_in_change(self, death: Death, config: str) -> None:
        """Ask for `config`; on the way there it happens."""
        generation, workers = self.settle(), workers_of(self.job)
        pids = {line["rank"]: line["pid"] for line in self.lines() if line["generation"] == generation}
        death.write(self.folder)
        self.etcd.scale(config)
        self._await_death("die-change.json", f"a death in the change to {config}")
        if death.who == "leaver":
            wait_until(lambda: workers - workers_of(self.job), "a death")
            victims = workers - workers_of(self.job)
        else:
            victims = {pids[death.who]} if death.who != "joiner" else set()
        self._bury(dict.fromkeys(victims, f"{death.point} in the change to {config}"))

    def _await_death(self, name: str, what: str) -> None:
        self.num_deaths += 1

        def has_come() -> bool:
            assert self.job.process.poll() is None, f"the job has ended before {what}:\n{self.job.output[-6000:]}"
            return not (self.folder / name).exists()

        wait_until(has_come, what)

    def _bury(self, victims: dict[int, str]) -> None:
        for pid in victims:
            wait_until(lambda pid=pid: not is_alive(pid), f"the end of {pid}")
        self.dead |= victims

    def end(self) -> int:
        """Let the job come to its end. Returns its last step."""
        last = self.lines()[-1]["step"] + 20
        (self.folder / "last.part").write_text(str(last))
        (self.folder / "last.part").rename(self.folder / "last")
        assert self.job.wait() == 0, self.job.output
        return last


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def workers_of(job: EtcRun) -> set[int]:
    """The pids of `job`'s processes that run the injected job."""
    return {pid for pid, command in job.descendants().items() if "injected_job" in command}


def check_account(lines: list[Line], dead: dict[int, str], last: int, num_deaths: int = 0) -> None:
    """What must hold whatever was done: every step applied once by every rank that lived, at most one step run again
    for each death, and the survivors' processes the same."""
    applied = [line for line in lines if "retried" not in line]
    legs = legs_of(lines)
    by_step: dict[int, list[Line]] = {}
    for line in applied:
        by_step.setdefault(line["step"], []).append(line)
    assert sorted(by_step) == list(range(last + 1)), "no step is left out"
    ends = {pid: max(line["step"] for line in lines if line["pid"] == pid) for pid in dead}
    for step, done in by_step.items():
        assert len({line["generation"] for line in done}) == 1, f"step {step} was applied in two generations: {done}"
        ranks = [line["rank"] for line in done]
        size = ParallelConfig.parse(done[0]["config"]).num_ranks
        assert len(ranks) == len(set(ranks)), f"step {step} was applied twice by a rank"
        missing = set(range(size)) - set(ranks)
        former = {line["rank"]: line["pid"] for line in applied if line["generation"] == done[0]["generation"]}
        fell = {rank for rank in missing if ends.get(former.get(rank, 0), step) <= step}
        assert missing == fell, f"step {step}: ranks {missing - fell} did not apply it"
    retried = {(line["generation"], line["step"]) for line in lines if "retried" in line}
    assert len(retried) <= num_deaths, f"{num_deaths} workers died and these steps ran again: {sorted(retried)}"
    for before, after in pairwise(legs):
        old, new = (
            {line["slot"]: line["pid"] for line in applied if line["generation"] == leg.generation}
            for leg in (before, after)
        )
        changed = {slot for slot in old.keys() & new.keys() if old[slot] != new[slot] and old[slot] not in dead}
        assert not changed, f"workers in {changed} have other pids in generation {after.generation}"


def begun_anew(lines: list[Line], dead: dict[int, str]) -> set[tuple[int, tuple[int, ...]]]:
    """(generation, place) of what only a dead worker had: the stream and the extras of its place."""
    holders: dict[int, dict[tuple[int, ...], int]] = {}
    for line in lines:
        holders.setdefault(line["generation"], {})[tuple(line["place"])] = line["pid"]
    anew: set[tuple[int, tuple[int, ...]]] = set()
    for before, after in pairwise(legs_of(lines)):
        old, new = holders[before.generation], holders[after.generation]
        for place in new.keys() & old.keys():
            if (old[place] in dead and old[place] not in new.values()) or (before.generation, place) in anew:
                anew.add((after.generation, place))
    return anew


def check_bits(folder: Path, lines: list[Line], dead: dict[int, str], last: int, fault: dict[str, Any]) -> list[Leg]:
    """Compare the job with one that makes the same changes by plan. Returns the generations that there were."""
    legs = legs_of(lines)
    found = differences(lines, replay(folder, legs, last, fault), begun_anew(lines, dead))
    assert not found, f"{len(found)} differences; {legs}; {dead}; first ones:\n" + "\n".join(found[:10])
    return legs


def options_json(**fault: object) -> str:
    return json.dumps(fault)


def pids_of_node(job: EtcRun) -> list[int]:
    """Everything that would end with the machine on which `job` runs: the agent, its guardian, its workers."""
    return [job.process.pid, *job.descendants()]
