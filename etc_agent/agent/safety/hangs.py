"""Finds workers that hang, by lack of progress; their stacks are logged before anything is killed.

When no worker of this node has shown progress for `hang_s`, each is told over its control connection to write its
stacks and to answer where it is. A worker that does not answer is stopped or cannot run Python, and is made to write
its stacks by a signal. A worker that answers is either inside a collective, waiting for others, or not. The leader
compares the answers of all nodes (`FailureKind` is ordered by likelihood of being the cause).
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from etc_agent.agent.processes.local_workers import LocalWorker
from etc_agent.control.channel import STACKS_SIGNAL
from etc_agent.control.messages import Position, WhereAreYou
from etc_agent.reconfig.known.records import Failure, FailureKind

logger = logging.getLogger(__name__)

ANSWER_S = 2.0
"""Seconds that a worker has to answer where it is."""
EXIT_CODE = 1


@dataclass(slots=True)
class HangWatch:
    """Checks the workers of a node. `hang_s`: 0 for never."""

    hang_s: float
    _asked_at: float = 0.0

    def look(self, workers: list[LocalWorker]) -> None:
        """Mark workers that hang, and clear the mark of those that have made progress since."""
        watched = [worker for worker in workers if _is_judged(worker)]
        if not self.hang_s or not watched:
            return
        now, alive_at = time.monotonic(), max(worker.life_at for worker in watched)
        if now - alive_at < self.hang_s:
            self._asked_at = 0.0
            for worker in watched:
                worker.hang = None
        elif not self._asked_at:
            self._asked_at = now
            logger.error("no step has ended for %.0f s (timeouts.hang_s); stacks go to the workers' logs", self.hang_s)
            for worker in watched:
                worker.position = None
                worker.send(WhereAreYou())
        elif now - self._asked_at >= ANSWER_S:
            for worker in watched:
                if worker.hang is None and (hang := _judged(worker)) is not None:
                    worker.hang = hang
                    if worker.position is None:
                        _write_stacks(worker.process.pid)
                    logger.error("the worker on %s %s", worker.slot, hang.error)


def _is_judged(worker: LocalWorker) -> bool:
    """Whether it can be said to hang: not one that never sent a heartbeat, has closed its session, or is about to
    end."""
    process = worker.process
    return bool(worker.life_at) and not worker.is_closed and process.exit_code is None and not process.is_stopping


def _judged(worker: LocalWorker) -> Failure | None:
    """Its failure; None for a joiner, which waits for its agent."""
    slot, pid, position = str(worker.slot), worker.process.pid, worker.position
    if _is_stopped(pid):
        return Failure(slot, FailureKind.UNRESPONSIVE, EXIT_CODE, f"hangs: pid {pid} is stopped (SIGSTOP)")
    if not worker.in_session:
        error = f"hangs: pid {pid} has sent no heartbeat since number {worker.heartbeats}"
        return Failure(slot, FailureKind.HUNG, EXIT_CODE, error, at=worker.heartbeats)
    if position is not None and not position.generation:
        return None
    if position is None:
        error = f"hangs: pid {pid} does not answer; its main thread may be stuck in native code"
        return Failure(slot, FailureKind.UNRESPONSIVE, EXIT_CODE, error)
    what = f"{position.phase} {position.step}, generation {position.generation}, at {position.where}"
    at = position.step + 0.5 * (position.phase == Position.VOTE)
    if position.is_waiting:
        return Failure(slot, FailureKind.WAITING, EXIT_CODE, f"waits for other workers in {what}", at=at)
    return Failure(slot, FailureKind.HUNG, EXIT_CODE, f"hangs in {what}", at=at)


def _write_stacks(pid: int) -> None:
    try:
        os.kill(pid, STACKS_SIGNAL)
    except ProcessLookupError:
        pass


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process (state T in /proc)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False
