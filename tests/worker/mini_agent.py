"""A small agent for tests: starts workers, hosts their store, and speaks the control protocol with them.

It does what the real agent's part of the protocol is, on one machine and without etcd. It handles the loss of workers
where a test asks for it (`kill`, `freeze`, `agree`, `recover`), and makes no fresh start after the first.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch.distributed as dist

from etc_agent.control.channel import JOINING_VARIABLE, SOCKET_VARIABLE, STACKS_SIGNAL, Channel
from etc_agent.control.environment import generation_variables
from etc_agent.control.messages import (
    Agreed,
    Armed,
    Committed,
    Describe,
    Described,
    FirstStep,
    Freeze,
    Frozen,
    Hello,
    Message,
    Prepare,
    Prepared,
    Refused,
    Switched,
    Withdrawn,
)
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Placement, Slot
from tests.forkserver import context

NODE = "node-a"
M = TypeVar("M", bound=Message)


def _worker_main(
    environment: dict[str, str], log: str, job: str, arguments: tuple[str, int, float, dict[str, Any]]
) -> None:
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.path.insert(0, str(Path(__file__).parent))
    directory, num_steps, pause_s, fault = arguments
    importlib.import_module(job).main(Path(directory), num_steps, pause_s, fault)


def _run_code(environment: dict[str, str], log: str, code: str) -> None:
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.path.insert(0, str(Path(__file__).parent))
    exec(compile(code, "script.py", "exec"), {"__name__": "__main__"})


def run_script(code: str, log: Path, environment: dict[str, str], timeout_s: float = 60.0) -> tuple[int | None, str]:
    """Run a few lines as a script of its own, without an agent; its exit code, and all that it wrote."""
    process = context.Process(target=_run_code, args=({"OMP_NUM_THREADS": "1", **environment}, str(log), code))
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, log.read_text()


@dataclass(eq=False)
class WorkerHandle:
    """One worker process and what it has said."""

    slot: Slot
    process: Any
    channel: Channel | None = None
    heard: list[Message] = field(default_factory=list)
    is_deaf: bool = False


class MiniAgent:
    """``with MiniAgent(tmp_path) as agent: agent.start("PP2"); agent.change("TP2DP2")``."""

    def __init__(
        self, directory: Path, *, num_steps: int = 1_000_000, pause_s: float = 0.005, verify: bool = True,
        fault: dict[str, Any] | None = None, timeout_s: float = 60.0,
        job: str = "tiny_job", environment: dict[str, str] | None = None,
    ) -> None:
        self._environment = environment or {}
        self._job = job
        self.directory = directory
        self.dump_dir = directory / "verify"
        self.fault = fault or {}
        self._arguments = (str(directory), num_steps, pause_s, self.fault)
        self._verify = verify
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self.workers: dict[Slot, WorkerHandle] = {}
        self.gone: list[WorkerHandle] = []
        self.generation: Generation | None = None
        self.lost: Placement = ()
        self._loss = 0
        self.next_id = 1
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._path = str(directory / "control.sock")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._path)
        self._listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listener.close()
        if error is not None:
            self._ask_for_stacks()
        for worker in [*self.workers.values(), *self.gone]:
            if worker.process.is_alive():
                worker.process.kill()
            worker.process.join()
        if error is not None:
            sys.stderr.write(self.logs())

    def _ask_for_stacks(self) -> None:
        """Have every worker that lives write the stacks of its threads to its log."""
        for worker in self.workers.values():
            if worker.channel is not None and worker.process.is_alive():
                os.kill(worker.process.pid, STACKS_SIGNAL)
        time.sleep(0.3)

    def logs(self) -> str:
        written = (path for path in sorted(self.directory.glob("worker-*.log")) if path.stat().st_size)
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in written)

    # -- what an agent does ----------------------------------------------------------------------------------------

    def start(self, config: str) -> None:
        """Generation 1, a fresh one."""
        parsed = ParallelConfig.parse(config)
        generation = self._next_generation(parsed, tuple(Slot(NODE, i) for i in range(parsed.num_ranks)), previous=0)
        for slot in generation.placement:
            self._spawn(slot, generation, joining=False)
        self.generation = generation
        for slot in generation.placement:
            self.hear(slot, Hello)

    def change(self, config: str, placement: Placement | None = None) -> dict[Slot, Switched]:
        """One whole change; what each worker reported when it had switched."""
        generation, everyone = self.prepare(config, placement)
        digests = set()
        for slot in everyone:
            answer = self.hear(slot, Prepared, Refused, generation=generation.id)
            assert isinstance(answer, Prepared), f"{slot}: {answer}"
            digests.add(answer.digest)
        assert len(digests) == 1
        return self.commit(generation, everyone)

    def prepare(self, config: str, placement: Placement | None = None) -> tuple[Generation, list[Slot]]:
        """Propose a generation to everyone in it and in the present one; start those that join."""
        parsed = ParallelConfig.parse(config)
        previous = self.generation
        assert previous is not None
        generation = self._next_generation(parsed, placement or self._default_placement(parsed), previous=previous.id)
        for slot in generation.placement:
            if slot not in self.workers:
                self._spawn(slot, generation, joining=True)
        before = [slot for slot in previous.placement if slot not in self.lost]
        everyone = list(dict.fromkeys((*before, *generation.placement)))
        for slot in everyone:
            self.hear(slot, Hello)
            self.send(slot, Prepare(NODE, generation.to_json(), previous.to_json()))
        return generation, everyone

    def commit(self, generation: Generation, everyone: list[Slot]) -> dict[Slot, Switched]:
        """Arm a prepared generation, and see everyone through the switch."""
        for slot in everyone:
            self.send(slot, Armed(generation.id))
        switched = {slot: self.hear(slot, Switched, generation=generation.id) for slot in everyone}
        for slot in everyone:
            if slot not in generation.placement:
                self.see_off(slot)
            else:
                self.send(slot, Committed(generation.id))
        self.generation = generation
        return switched

    def withdraw(self, generation: Generation, everyone: list[Slot], reason: str = "test") -> None:
        for slot in everyone:
            self.send(slot, Withdrawn(generation.id, reason))
        for slot in everyone:
            if self.generation is not None and slot not in self.generation.placement:
                self.see_off(slot)

    # -- a loss ----------------------------------------------------------------------------------------------------

    def await_death(self, *slots: Slot) -> None:
        """Wait until the workers there have been killed, by themselves or by the test."""
        for slot in slots:
            worker = self.workers.pop(slot)
            self.gone.append(worker)
            worker.process.join(self._timeout_s)
            assert worker.process.exitcode == -9, f"{slot} has ended with {worker.process.exitcode}"
            self.lost = (*self.lost, slot)

    def kill(self, *slots: Slot) -> None:
        for slot in slots:
            self.workers[slot].process.kill()
        self.await_death(*slots)

    def freeze(self) -> dict[Slot, Frozen]:
        """Freeze all that are left; what they answer."""
        self._loss += 1
        for slot in self.workers:
            self.send(slot, Freeze(self._loss))
        return {slot: self.hear(slot, Frozen, loss=self._loss) for slot in self.workers}

    def agree(self, frozen: dict[Slot, Frozen], proposed: Generation | None = None) -> Agreed:
        """The agreement that follows from what the survivors have answered, told to those that go on. `proposed`: the
        generation that any of them may have entered."""
        assert self.generation is not None
        furthest = max(frozen.values(), key=lambda answer: (answer.generation, answer.step))
        agreed = Agreed(self._loss, furthest.generation, furthest.step, furthest.ok)
        if proposed is not None and agreed.generation == proposed.id:
            self.generation = proposed
            self.lost = tuple(slot for slot in self.lost if slot in proposed.placement)
        for answer in frozen.values():
            assert not answer.broken or answer.completed == agreed.generation, answer.broken
        for slot, answer in frozen.items():
            if answer.generation or answer.completed == agreed.generation:
                assert agreed.generation in (answer.generation, answer.completed), (agreed, answer)
                self.send(slot, agreed)
        return agreed

    def agree_on_copies(self, frozen: dict[Slot, Frozen]) -> Agreed:
        """As `agree`, where only copies are left of what was lost: all go back to the newest set that all have."""
        assert self.generation is not None
        step = min(answer.copied for answer in frozen.values())
        assert step >= 0, "nobody has copies"
        agreed = Agreed(self._loss, self.generation.id, step, from_copies=True)
        for slot in frozen:
            self.send(slot, agreed)
        return agreed

    def recover(self, config: str, placement: Placement | None = None) -> dict[Slot, Switched]:
        """The change that follows a loss. By default the survivors keep their order."""
        assert self.generation is not None
        survivors = [slot for slot in self.generation.placement if slot not in self.lost]
        switched = self.change(config, placement or tuple(survivors[: ParallelConfig.parse(config).num_ranks]))
        self.lost = ()
        return switched

    def describe(self, slot: Slot, config: str) -> Described:
        self.send(slot, Describe(config))
        return self.hear(slot, Described, config=config)

    def first_steps(self) -> dict[Slot, FirstStep]:
        assert self.generation is not None
        return {slot: self.hear(slot, FirstStep, generation=self.generation.id) for slot in self.generation.placement}

    def last_step_in(self, num_steps: int) -> int:
        """Let the job end some steps from now, far enough ahead for every rank to hear of it in time."""
        last = self.steps()[-1]["step"] + num_steps
        (self.directory / "last.part").write_text(str(last))
        (self.directory / "last.part").rename(self.directory / "last")
        return last

    def rebind(self, kinds: str) -> None:
        """Have every worker do `kinds` (`rebinding`) after one step, the same one, and wait until it is done."""
        step = self.steps()[-1]["step"] + 25
        (self.directory / "rebind.part").write_text(kinds)
        (self.directory / "rebind.part").rename(self.directory / f"rebind-{step}")
        assert self.steps()[-1]["step"] < step
        self.wait_for(lambda: self.steps()[-1]["step"] > step, f"step {step} to end")

    def finish(self) -> dict[Slot, int]:
        """Wait until every worker has ended by itself; their exit codes."""
        for worker in self.workers.values():
            worker.process.join(self._timeout_s)
        ended = {slot: worker.process.exitcode for slot, worker in self.workers.items()}
        assert None not in ended.values(), f"still running after {self._timeout_s} s: {ended}"
        return ended

    def see_off(self, slot: Slot) -> None:
        """Wait until the worker there has left by itself."""
        worker = self.workers.pop(slot)
        self.gone.append(worker)
        worker.process.join(self._timeout_s)
        assert worker.process.exitcode == 0, f"{slot} left with {worker.process.exitcode}"

    # -- plumbing --------------------------------------------------------------------------------------------------

    def send(self, slot: Slot, message: Message) -> None:
        channel = self.workers[slot].channel
        assert channel is not None
        channel.send(message)

    def hear(self, slot: Slot, *kinds: type[M], **fields: Any) -> M:
        """The first message of one of `kinds` from `slot`'s worker whose fields are as given."""
        worker = self.workers[slot]

        def find() -> M | None:
            for message in worker.heard:
                if isinstance(message, kinds) and all(getattr(message, k) == v for k, v in fields.items()):
                    return message
            return None

        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while (found := find()) is None:
                wanted = f"expected {[k.__name__ for k in kinds]}"
                assert not worker.is_deaf, f"{slot} ended; {wanted}"
                assert time.monotonic() < deadline, f"{slot} is silent for {self._timeout_s} s; {wanted}"
                self._changed.wait(1.0)
        return found

    def steps(self) -> list[dict[str, Any]]:
        """Every line that every worker has logged, oldest first."""
        lines = []
        for path in self.directory.glob("steps-*.jsonl"):
            # A worker may be writing its last one.
            lines += [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return sorted(lines, key=lambda line: (line["step"], line["rank"]))

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {self._timeout_s} s in vain for {what}"
            time.sleep(0.02)

    def _next_generation(self, config: ParallelConfig, placement: Placement, previous: int) -> Generation:
        number, self.next_id = self.next_id, self.next_id + 1
        store = f"127.0.0.1:{self._store.port}"
        return Generation(number, config, placement, store, previous, "test", lost=self.lost)

    def _default_placement(self, config: ParallelConfig) -> Placement:
        assert self.generation is not None
        kept = self.generation.placement[: config.num_ranks]
        free = (Slot(NODE, i) for i in range(64) if Slot(NODE, i) not in self.workers)
        return (*kept, *(next(free) for _ in range(config.num_ranks - len(kept))))

    def _spawn(self, slot: Slot, generation: Generation, joining: bool) -> None:
        environment = {
            **generation_variables(generation, slot), "LOCAL_RANK": str(slot.index), "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "test",
            SOCKET_VARIABLE: self._path, JOINING_VARIABLE: "1" if joining else "0", **self._environment,
        }
        if self._verify:
            environment["ETC_VERIFY"] = str(self.dump_dir)
            environment["ETC_TRACE"] = str(self.dump_dir.with_name("trace"))
        log = str(self.directory / f"worker-{slot.index}-gen{generation.id}.log")
        process = context.Process(target=_worker_main, args=(environment, log, self._job, self._arguments), daemon=True)
        process.start()
        self.workers[slot] = WorkerHandle(slot, process)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._listen, args=(Channel(connection),), daemon=True).start()

    def _listen(self, channel: Channel) -> None:
        hello = channel.receive()
        assert isinstance(hello, Hello)
        worker = self.workers[Slot(NODE, hello.local_rank)]
        worker.channel = channel
        message: Message | None = hello
        while message is not None:
            with self._changed:
                worker.heard.append(message)
                self._changed.notify_all()
            message = channel.receive()
        with self._changed:
            worker.is_deaf = True
            self._changed.notify_all()
