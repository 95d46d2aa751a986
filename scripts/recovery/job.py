"""A job under etc-run from which workers and agents are taken without notice, and what it and its etcd say of that."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.reconfig.known.records import Current, History, NodeRecord
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.mirror import Mirror
from etc_agent.rendezvous.private.listen import OnPort
from etc_agent.rendezvous.private.server import EtcdServer
from tests.scenarios.running import EtcRun

DEMO = Path(__file__).resolve().parents[1] / "train_gpt.py"
TINY = Path(__file__).with_name("tiny_session.py")
TIMEOUT_S = 120.0
_RUN_ID = "recovery"
_POLL_S = 0.005
Place = tuple[int, int, int]


class RecoveryError(Exception):
    """The job did not do what it should; the message says what."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that trains, at a place (pp, dp, tp) of the grid."""

    pid: int
    place: Place


@dataclass(slots=True)
class Lost:
    """One loss, in seconds since the signal. `next_step_s`: the end of the next step that was completed after it;
    `full_size_s`: the same for the first step at full size. `moments`: what etcd showed when. `wrong`: why this sample
    does not count, "" normally."""

    what: str
    next_step_s: float = 0.0
    full_size_s: float = 0.0
    steps_redone: int = 0
    moments: dict[str, float] = field(default_factory=dict)
    phases_ms: dict[str, float] = field(default_factory=dict)
    wrong: str = ""


class RecoveringJob:
    """`num_nodes` agents on loopback addresses with `num_slots` each, over an etcd of their own, run the `command` of
    a script in `config`. Everything is ended at the end of `with`."""

    def __init__(
        self, folder: Path, config: str, command: Sequence[str | Path], *, num_nodes: int = 1, num_slots: int = 4,
        job_file: dict[str, Any] | None = None,
    ) -> None:
        folder.mkdir()
        self.config = ParallelConfig.parse(config)
        self._keys = JobKeys(_RUN_ID)
        self._num_idle = num_nodes * num_slots - self.config.num_ranks
        self._samples = folder / "samples"
        self._steps = JsonLines(folder / "steps.jsonl")
        self._accounts: dict[Path, JsonLines] = {}
        self._workers: dict[int, dict[Place, Worker]] = defaultdict(dict)
        self._seen: list[tuple[float, Current]] = []
        path = folder / "job.yaml"
        settings = {"max_restarts": 1000, "alike_failures": 0, "failures": {"max_per_window": 0}, **(job_file or {})}
        path.write_text(yaml.safe_dump(settings))
        with ExitStack() as stack:
            self.etcd = stack.enter_context(EtcdServer(listen=OnPort("127.0.0.1")))
            self.agents = [
                EtcRun(
                    "--config", path, "--nnodes", f"1:{num_nodes}", "--nproc-per-node", num_slots, "--rdzv-id", _RUN_ID,
                    "--etcd-endpoints", self.etcd.endpoint, "--local-addr", f"127.0.0.{number + 2}", *command,
                    "--steps=1000000", f"--step-log={self._steps.path}", f"--sample-log={self._samples}",
                    cwd=folder, environment={"ETC_SPARES": "warm"}, prefix=("env",),
                )
                for number in range(num_nodes)
            ]
            stack.callback(lambda: [agent.kill() for agent in self.agents])
            self._client = stack.enter_context(EtcdClient([self.etcd.endpoint], timeout_s=30.0))
            self._client.put(self._keys.scale, config)
            self._mirror = Mirror(self._client, self._keys.root, self._note)
            stack.callback(self._mirror.close)
            self._stack = stack.pop_all()

    def __enter__(self) -> RecoveringJob:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ---- what it says ---------------------------------------------------------------------------------------------

    def steps(self) -> list[dict[str, Any]]:
        """A line per step that was completed, in the order in which they were written."""
        return self._steps.read()

    def workers(self, generation: int) -> dict[Place, Worker]:
        """The processes that have completed a step of `generation`."""
        for path in self._samples.glob("samples-*.jsonl"):
            pid = int(path.stem.partition("-")[2])
            account = self._accounts.setdefault(path, JsonLines(path))
            seen = len(account.lines)
            for line in account.read()[seen:]:
                place = line["pp"], line["dp"], line["tp"]
                self._workers[line["generation"]][place] = Worker(pid, place)
        return self._workers[generation]

    def current(self) -> Current:
        entry = self._mirror.snapshot().get(self._keys.current)
        return Current.from_json(entry.json()) if entry else Current()

    def generation(self, number: int) -> Generation:
        return Generation.from_json(self._mirror.snapshot()[self._keys.generation(number)].json())

    def history(self, number: int) -> History | None:
        entry = self._mirror.snapshot().get(f"{self._keys.history_prefix}{number}")
        return History.from_json(entry.json()) if entry else None

    def _nodes(self) -> list[NodeRecord]:
        found = self._mirror.snapshot()
        return [NodeRecord.from_json(found[key].json()) for key in found if key.startswith(self._keys.nodes_prefix)]

    def leader(self) -> str:
        entry = self._mirror.snapshot().get(self._keys.leader)
        return entry.text if entry else ""

    def settle(self) -> dict[Place, Worker]:
        """Wait until the whole job trains in its full config, with nothing else to do, and a warm spare in every idle
        slot. Returns its workers."""

        def is_settled() -> dict[Place, Worker] | None:
            current = self.current()
            if not current.committed or current.proposed or current.loss:
                return None
            if self.generation(current.committed).config.num_ranks != self.config.num_ranks:
                return None
            if self._num_idle and sum(len(node.spares) for node in self._nodes()) < self._num_idle:
                return None
            workers = self.workers(current.committed)
            count = sum(line["generation"] == current.committed for line in self.steps()[-20:])
            return workers if len(workers) == self.config.num_ranks and count >= 8 else None

        return self._wait(is_settled, f"{self.config} to train undisturbed")

    # ---- what is done to it ---------------------------------------------------------------------------------------

    def lose(self, what: str, victims: set[int], strike: Callable[[], None], full: int) -> Lost:
        """Do `strike`, which ends the workers `victims`, and see the job recover to `full` workers."""
        lost, workers = Lost(what), self.settle()
        before, restarts = self.current().committed, self.current().restarts
        survivors = {worker.pid for worker in workers.values()} - victims
        began, seen = time.time(), len(self._seen)
        strike()
        try:
            first = self._wait(lambda: self._first_step(began, before, 1), f"a step after {what}")
            lost.next_step_s = first["time"] - began
            last = max(line["step"] for line in self.steps() if line["generation"] <= before)
            # The step that was under way is run again at most; it is one of those that follow the last completed one.
            lost.steps_redone = last + 2 - first["step"]
            whole = self._wait(lambda: self._first_step(began, before, full), f"{full} workers after {what}")
            lost.full_size_s = whole["time"] - began
            lost.wrong = self._wrong(before, restarts, first["generation"], survivors)
            history = self.history(first["generation"])
            if history is not None:
                lost.phases_ms = {f"prepare: {name}": ms for name, ms in history.prepare_ms.items()} | history.phases_ms
        except RecoveryError as error:
            lost.wrong = str(error)
        lost.moments = self._moments(began, seen, before)
        lost.moments["first step"] = lost.next_step_s
        return lost

    def kill_worker(self, place: Place) -> Lost:
        worker = self.settle()[place]
        name = f"SIGKILL of the worker at pp{place[0]} dp{place[1]} tp{place[2]}"
        strike = partial(os.kill, worker.pid, signal.SIGKILL)
        return self.lose(name, {worker.pid}, strike, full=self.config.num_ranks)

    def kill_agent(self, agent: EtcRun) -> Lost:
        """SIGKILL of an agent alone: its guardian ends its workers. The full size does not come back."""
        workers = {worker.pid for worker in self.settle().values()}
        victims = workers & agent.descendants().keys()
        strike = partial(os.kill, agent.process.pid, signal.SIGKILL)
        return self.lose("SIGKILL of an agent", victims, strike, full=len(workers) - len(victims))

    def step_s(self, num_steps: int) -> float:
        """The mean of so many steps, which begin with the end of the next one."""
        begin = len(self.steps())
        self._wait(lambda: len(self.steps()) > begin + num_steps, f"{num_steps} steps")
        steps = self.steps()
        return float(steps[begin + num_steps]["time"] - steps[begin]["time"]) / num_steps

    def stop_workers(self) -> None:
        """Have them use no CPU, until `let_workers_go_on`."""
        self._signal_workers(signal.SIGSTOP)

    def let_workers_go_on(self) -> None:
        self._signal_workers(signal.SIGCONT)

    def _signal_workers(self, number: signal.Signals) -> None:
        for worker in self.workers(self.current().committed).values():
            os.kill(worker.pid, number)

    def _first_step(self, began: float, before: int, least: int) -> dict[str, Any] | None:
        """The first step since `began` of a later generation than `before` with `least` workers."""
        for line in self.steps()[-200:]:
            is_large_enough = ParallelConfig.parse(line["config"]).num_ranks >= least
            if line["time"] > began and line["generation"] > before and is_large_enough:
                return line
        return None

    def _wrong(self, before: int, restarts: int, after: int, survivors: set[int]) -> str:
        current = self.current()
        fresh = [number for number in range(before + 1, current.committed + 1) if self._is_fresh(number)]
        if fresh or current.restarts != restarts:
            reasons = "; ".join(self.generation(number).reason for number in fresh)
            return f"all workers were restarted: {reasons or current.why}"
        num_ranks = self.generation(after).config.num_ranks
        # One rank writes the step down a little before another does.
        self._wait(lambda: len(self.workers(after)) == num_ranks, f"all ranks' accounts of generation {after}")
        kept = survivors & {worker.pid for worker in self.workers(after).values()}
        if len(kept) < min(len(survivors), num_ranks):
            return f"of {len(survivors)} survivors {len(kept)} trained on in their processes"
        return ""

    def _is_fresh(self, number: int) -> bool:
        entry = self._mirror.snapshot().get(self._keys.generation(number))
        return entry is not None and Generation.from_json(entry.json()).is_fresh

    def _moments(self, began: float, seen: int, before: int) -> dict[str, float]:
        """What `current` first said when, in seconds since `began`."""
        tests: dict[str, Callable[[Current], bool]] = {
            "loss written": lambda current: current.loss is not None,
            "agreed": lambda current: current.loss is not None and current.loss.agreement is not None,
            "proposed": lambda current: current.proposed > before,
            "armed": lambda current: current.proposed > before and current.phase == "armed",
            "committed": lambda current: current.committed > before,
        }
        moments = {}
        for name, test in tests.items():
            at = next((moment for moment, current in self._seen[seen:] if test(current)), None)
            if at is not None:
                moments[name] = at - began
        return moments

    def _note(self) -> None:
        with suppress(AttributeError):  # the mirror's first notice comes before it is assigned
            current = self.current()
            if not self._seen or self._seen[-1][1] != current:
                self._seen.append((time.time(), current))

    def _wait(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + TIMEOUT_S
        while not (value := condition()):
            if time.monotonic() > deadline:
                tail = "\n".join(line for agent in self.agents for line in agent.lines[-15:])
                raise RecoveryError(f"waited {TIMEOUT_S:.0f} s in vain for {what}:\n{tail}")
            time.sleep(_POLL_S)
        return value


class JsonLines:
    """A file of JSON lines that is read as it grows. What is not a whole line yet is left for later."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Every line so far."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._offset)
                for raw in file:
                    if not raw.endswith(b"\n"):
                        break
                    self._offset += len(raw)
                    self.lines.append(json.loads(raw))
        return self.lines
