"""The workers of this node: their processes, what they have sent, and what was sent to them."""

from __future__ import annotations

import logging
import signal
import time
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from etc_agent.agent.processes.deaths import DeathWatch
from etc_agent.agent.processes.worker_process import WorkerProcess
from etc_agent.agent.safety.guardian import Guardian
from etc_agent.agent.safety.signals import catches
from etc_agent.control.channel import Channel, MessageTooLargeError
from etc_agent.control.messages import (
    Closed,
    Described,
    Finish,
    FirstStep,
    Freeze,
    Frozen,
    Heartbeat,
    Hello,
    Message,
    PeerLost,
    Plain,
    Position,
    Prepared,
    Progress,
    Raised,
    Refused,
    Signalled,
    Switched,
    shows_life,
)
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.records import Failure, first_cause
from etc_agent.reconfig.known.worker_view import WorkerView

logger = logging.getLogger(__name__)

_LAST_MESSAGES_S = 2.0
"""Seconds to wait for the last messages of a worker that has ended. They are in the socket already, so this limits only
how long this agent's own thread may take to read them."""
_FOR_ALL_S = 2.0
"""A signal to leave that reaches a worker counts for the whole node if the agent gets one too within this many
seconds."""


@dataclass(slots=True)
class LocalWorker:
    """One worker: its process, and the state of the communication with it.

    `life_at`: when it last sent a message that shows progress of its main thread, in time.monotonic() seconds; 0:
    never. `hang`: what is known about it if it hangs. `fell_at`: when it was ended by a signal to leave that this agent
    did not send. `left_to_us`: such a signal that its session passed to this agent, and when. `freeze`: the number of
    the loss for which it was last told to freeze, and when.
    """

    slot: Slot
    started_for: int
    process: WorkerProcess
    started_at: float
    channel: Channel | None = None
    is_closed: bool = False
    ended_at: float = 0.0
    told: set[tuple[str, int]] = field(default_factory=set)
    received: dict[str, dict[int, Message]] = field(default_factory=lambda: defaultdict(dict))
    progress: Progress | None = None
    heartbeats: int = 0
    position: Position | None = None
    hang: Failure | None = None
    fell_at: float = float("-inf")
    left_to_us: tuple[int, float] | None = None
    freeze: tuple[int, float] | None = None
    life_at: float = 0.0
    in_session: bool = False
    began_at: int = 0
    is_plain: bool = False
    has_closed: bool = False

    @property
    def exit_code(self) -> int | None:
        """The exit code, once the process has ended, all its messages have been read, and it is clear whether a signal
        to leave that ended it was meant for the whole node."""
        if time.monotonic() - self.fell_at < _FOR_ALL_S:
            return None
        if self.process.exit_code is None or self.channel is None or self.is_closed:
            return self.process.exit_code
        return self.process.exit_code if time.monotonic() - self.ended_at > _LAST_MESSAGES_S else None

    def _failure(self) -> Failure | None:
        if self.exit_code is None:
            return self.hang
        return self.process.failure(str(self.slot))

    def has_ended(self) -> None:
        """The process has ended: everything that it has sent is there. Its own children may hold the connection open,
        and are not waited for."""
        self.ended_at = time.monotonic()
        if self.channel is not None:
            self.channel.end_of_input()

    def send(self, message: Message) -> None:
        """Send if the worker is connected. That a worker is gone is noticed elsewhere."""
        if self.channel is not None:
            try:
                self.channel.send(message)
            except OSError:
                logger.debug("worker %s is gone; %s was not delivered", self.slot, message.type)
            except MessageTooLargeError as error:
                logger.error("a message to worker %s could not be sent: %s", self.slot, error)

    def view(self) -> WorkerView:
        return WorkerView(
            self.slot.index,
            self.started_for,
            in_session=self.in_session,
            began_at=self.began_at,
            is_plain=self.is_plain and not self.in_session,
            has_stepped=self.progress is not None,
            has_closed=self.has_closed,
            exit_code=self.exit_code,
            failure=self._failure(),
            told=frozenset(self.told),
            prepared=dict(self.received[Prepared.type]),  # type: ignore[arg-type]
            refused=dict(self.received[Refused.type]),  # type: ignore[arg-type]
            switched=dict(self.received[Switched.type]),  # type: ignore[arg-type]
            first_step=dict(self.received[FirstStep.type]),  # type: ignore[arg-type]
            frozen=dict(self.received[Frozen.type]),  # type: ignore[arg-type]
            peer_lost=dict(self.received[PeerLost.type]),  # type: ignore[arg-type]
        )


class LocalWorkers:
    """All workers of the node by slot index. Used from the agent's main thread only.

    `leave_signals`: the signals that tell this node to leave. `stop_signal`: the first signal for a worker that has to
    end; a signal that told this node to leave is passed on.
    """

    def __init__(
        self, node: str, guardian: Guardian, deaths: DeathWatch, leave_signals: Collection[int] = ()
    ) -> None:
        self._leave_signals = frozenset(leave_signals)
        self._node = node
        self._guardian, self._deaths = guardian, deaths
        self._workers: dict[int, LocalWorker] = {}
        self.stop_signal: int = signal.SIGTERM

    def all(self) -> list[LocalWorker]:
        return list(self._workers.values())

    def views(self) -> dict[int, WorkerView]:
        return {index: worker.view() for index, worker in self._workers.items()}

    def add(self, index: int, started_for: int, process: WorkerProcess) -> None:
        """Register a process that was started in slot `index`; the previous one there has ended."""
        self._guardian.watch_group(process.pid)
        self._deaths.watch(process.pid)
        self._workers[index] = LocalWorker(Slot(self._node, index), started_for, process, time.monotonic())

    def poll(self) -> None:
        """Check which processes have ended."""
        for worker in self._workers.values():
            if worker.process.exit_code is None and worker.process.poll() is not None:
                worker.has_ended()
                self._deaths.forget(worker.process.pid)
                self._guardian.forget_group(worker.process.pid)
                worker.process.kill_group()
                if worker.process.killed_by in self._leave_signals and not worker.process.is_stopping:
                    worker.fell_at = worker.ended_at

    def heed_signals(self, *, is_leaving: bool) -> bool:
        """Handle signals to leave that workers received and this agent has not sent: a scheduler signals all processes
        of a job at once. `is_leaving`: whether this node was told to leave. Returns whether its workers are lost by
        that.

        A signal that a session has passed to this agent is answered by leaving, or by ending the worker: at once where
        it is the agent's own stop signal, otherwise by sending the worker that signal again.
        """
        now, has_fallen = time.monotonic(), False
        for worker in self._workers.values():
            if worker.left_to_us is not None:
                number, at = worker.left_to_us
                if worker.process.was_asked:
                    worker.left_to_us = None
                    worker.process.kill_group()
                elif not is_leaving and now - at > _FOR_ALL_S:
                    worker.left_to_us = None
                    worker.process.send_signal(number)
            if is_leaving and now - worker.fell_at < _FOR_ALL_S:
                worker.fell_at = float("-inf")
                worker.process.excuse()
                has_fallen = True
        return has_fallen

    def send_signal(self, number: int) -> None:
        """Send `number` to every worker that has a handler for it; the others would be ended by it."""
        for worker in self._workers.values():
            if worker.process.exit_code is not None:
                continue
            if catches(worker.process.pid, number):
                worker.process.send_signal(number)
            else:
                name = signal.Signals(number).name
                logger.warning("%s is not forwarded to worker %s: it has no handler and would end", name, worker.slot)

    def stop(self, index: int, grace_s: float, *, after_s: float = 0.0) -> None:
        worker = self._workers[index]
        worker.process.stop(0.0 if worker.hang else grace_s, after_s=after_s, number=self.stop_signal)

    def finish(self, index: int) -> bool:
        """Ask a worker for a last checkpoint; returns whether it runs a session, and so may write one."""
        worker = self._workers[index]
        if not worker.in_session or worker.hang is not None:
            return False
        if (Finish.type, 0) not in worker.told:
            self.tell(index, 0, Finish())
        return True

    def kill(self, index: int) -> None:
        """End the worker in slot `index` at once. It counts as failed, unlike one that is stopped."""
        self._workers[index].process.kill_group()

    def kill_unfrozen(self, freeze_s: float) -> None:
        """End the workers that were told to freeze `freeze_s` ago and have not answered."""
        for worker in self._workers.values():
            if worker.freeze is None or worker.process.exit_code is not None:
                continue
            number, told_at = worker.freeze
            if number in worker.received[Frozen.type]:
                worker.freeze = None
            elif time.monotonic() - told_at >= freeze_s:
                worker.freeze = None
                what = "worker %s has not stopped within %g s (timeouts.freeze_s) of the loss of another; it is killed"
                logger.error(what, worker.slot, freeze_s)
                worker.process.kill_group()

    def stop_all(self, grace_s: float) -> None:
        for worker in self._workers.values():
            if worker.process.exit_code is None:
                worker.process.stop(grace_s, number=self.stop_signal)

    def failures(self, generation: Generation | None) -> dict[int, ProcessFailure]:
        """torchelastic's failure record of each failed worker, by its rank in `generation`; the one that most likely
        caused the others first."""
        failed = {failure: worker for worker in self._workers.values() if (failure := worker.view().failure)}
        cause = first_cause(failed)
        found = {}
        for failure in sorted(failed, key=lambda failure: failure != cause):
            worker = failed[failure]
            if (seen := worker.process.process_failure) is not None:
                found[_rank_of(worker, generation)] = _of_slot(seen, worker.slot.index)
        return found

    def returned(self, generation: Generation | None) -> dict[int, Any]:
        """The return value of each worker that has exited with code 0, by its rank in `generation`."""
        ended = [worker for worker in self._workers.values() if worker.process.exit_code == 0]
        return {_rank_of(worker, generation): worker.process.returned for worker in ended}

    @property
    def exit_code(self) -> int:
        """The exit code of the worker that most likely caused the other failures; 0 where none has failed."""
        cause = first_cause(failure for worker in self._workers.values() if (failure := worker.view().failure))
        return cause.exit_code if cause else 0

    def were_stopped(self, indices: Collection[int]) -> bool:
        """Whether this agent ended the last worker in one of these slots."""
        return any(worker.process.is_stopping for index, worker in self._workers.items() if index in indices)

    @property
    def vacant(self) -> list[int]:
        """The slots whose workers have failed and ended."""
        return [index for index, worker in self._workers.items() if worker.process.failure(str(worker.slot))]

    @property
    def are_running(self) -> bool:
        return any(worker.process.exit_code is None for worker in self._workers.values())

    def are_under_way(self, start_s: float) -> bool:
        """Whether every worker that runs has opened its session, or has been running for `start_s`."""
        now = time.monotonic()
        return all(
            worker.in_session or worker.process.exit_code is not None or now - worker.started_at >= start_s
            for worker in self._workers.values()
        )

    def have_progressed(self, start_s: float) -> bool:
        """Whether one has completed a step; or, without a session, has run for longer than `start_s`."""
        now = time.monotonic()
        return any(
            worker.progress is not None
            or (not worker.in_session and (worker.ended_at or now) - worker.started_at > start_s)
            for worker in self._workers.values()
        )

    def tell(self, index: int, generation: int, message: Message) -> None:
        """Send `message` to a worker, unless it was sent before."""
        worker = self._workers[index]
        worker.told.add((message.type, generation))
        if isinstance(message, Freeze):
            worker.freeze = (message.loss, time.monotonic())
        worker.send(message)

    def ask(self, message: Message, members: frozenset[int]) -> bool:
        """Send `message` to the first worker of `members` that runs a session; returns whether there is one."""
        for index in sorted(members):
            worker = self._workers.get(index)
            if worker is None or not worker.in_session or worker.process.exit_code is not None:
                continue
            if worker.channel is not None:
                try:
                    worker.channel.send(message)
                    return True
                except OSError:
                    continue
        return False

    def receive(self, hello: Hello, channel: Channel, message: Message | None) -> Described | None:
        """Handle a worker's message. A Described is returned, since it is the leader's to handle."""
        worker = self._workers.get(hello.local_rank)
        if worker is None or worker.started_for != hello.generation:
            return None
        if shows_life(message):
            worker.life_at = time.monotonic()
        match message:
            case None:
                worker.is_closed = worker.is_closed or channel is worker.channel
            case Hello():
                logger.debug("%s said hello in %.3f s", worker.slot, time.monotonic() - worker.started_at)
                if hello.in_session or worker.channel is None:
                    worker.channel, worker.in_session, worker.began_at = channel, hello.in_session, hello.step
                    worker.has_closed = False
            case Position():
                worker.position = message
            case Plain():
                worker.is_plain = True
            case Closed():
                worker.has_closed = True
            case Described():
                return message
            case Prepared() | Refused() | Switched() | FirstStep() | PeerLost():
                worker.received[message.type][message.generation] = message
            case Frozen():
                worker.received[message.type][message.loss] = message
            case Progress():
                worker.progress = message
            case Signalled(number):
                worker.left_to_us = (number, time.monotonic())
            case Heartbeat(count):
                worker.heartbeats = count
            case Raised():
                worker.process.raised = message
            case _:
                logger.warning("worker %s sent %s, which only an agent sends", worker.slot, message.type)
        return None

    def progress(self) -> Progress | None:
        """The progress of the worker that is furthest."""
        received = [worker.progress for worker in self._workers.values() if worker.progress is not None]
        return max(received, key=lambda progress: (progress.generation, progress.step), default=None)


def _rank_of(worker: LocalWorker, generation: Generation | None) -> int:
    """The rank of a worker in `generation`; where it is not in that, the rank that it was started with."""
    if generation is not None and worker.slot in generation.placement:
        return generation.placement.index(worker.slot)
    return worker.process.rank


def _of_slot(failure: ProcessFailure, index: int) -> ProcessFailure:
    """`failure` under the worker's local rank: each process context holds one process, numbered 0."""
    failure.local_rank = index
    return failure
