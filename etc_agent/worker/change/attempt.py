"""One worker's attempt to enter a prepared generation: errors, and the votes that decide whether it is committed.

    vote of all workers -> vote of the old generation's workers -> worker 0 tells the workers that join

A worker that is lost during the first vote leaves some workers with its result and others with an error. The second
vote runs over the old generation's own connections and decides: the change is committed only if all old workers saw the
first vote succeed. So losing a worker that joins costs the others only time. Losing a worker of the old generation is
different: that generation cannot train without it in any case. Then all survivors agree on the generation through their
agents (`worker.loss`), and so they do where workers are lost in a change that itself follows a loss, in which there is
no vote of the old generation.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

import torch
import torch.distributed as dist

from etc_agent.control.causes import ErrorKind, kind_of
from etc_agent.errors import one_line
from etc_agent.worker.change.phases import Phases
from etc_agent.worker.change.prepared import PreparedGeneration
from etc_agent.worker.loss.latch import Latch, Seen
from etc_agent.worker.vote import Ballot, Vote, minimum

_log = logging.getLogger(__name__)

T = TypeVar("T")

_COMMITTED_TAG = 2


class Told(Enum):
    """How the other workers learn of a problem on this one."""

    KNOWN = "all of them have found the same"
    BY_VOTE = "this worker says so in the next vote"
    BY_CUTTING = "they may be waiting for messages of this worker: its connections are cut"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why this worker cannot enter the generation: `reason` in one line for people."""

    reason: str
    kind: ErrorKind
    told: Told


class Attempt:
    """One worker's attempt. `old_vote`: of the old generation; None on a worker that joins, and after a loss. `latch`:
    every result passes it before it is acted on.

    Attributes:
        problem: the first error of this worker; later parts of the switch are then skipped.
        last_sends: messages to the workers that join, not yet complete.
    """

    def __init__(
        self, prepared: PreparedGeneration, old_vote: Vote | None, latch: Latch, phases: Phases
    ) -> None:
        self._prepared = prepared
        self._mode = prepared.mode
        self._old_vote = old_vote
        self._latch = latch
        self._phases = phases
        self._has_completed = False
        self.problem: Problem | None = None
        self.last_sends: list[dist.Work] = []

    @property
    def reason(self) -> str:
        """Why this worker cannot enter, or "" if it can."""
        return self.problem.reason if self.problem is not None else ""

    @property
    def kind(self) -> ErrorKind:
        """The kind of that problem. Without a problem here, another worker has one."""
        return self.problem.kind if self.problem is not None else ErrorKind.PEER_LOST

    @property
    def lost_connections(self) -> bool:
        return self.problem is not None and self.problem.told is Told.BY_CUTTING

    def do(self, phase: str, work: Callable[[], T]) -> T | None:
        """Run a part that needs no other worker. Returns None if it fails, or if an earlier part has failed."""
        return self._do(work, Told.BY_VOTE, phase)

    def talk(self, work: Callable[[], T]) -> T | None:
        """`do` for a part in which workers wait for each other, and which times its phases itself."""
        return self._do(work, Told.BY_CUTTING, None)

    def _do(self, work: Callable[[], T], told: Told, phase: str | None) -> T | None:
        if self.problem is not None:
            return None
        try:
            if phase is None:
                return work()
            with self._phases.phase(phase):
                return work()
        except Exception as error:
            self._meet(Problem(one_line(error), kind_of(error), told), error)
            return None

    def meet_known(self, reason: str) -> None:
        """Record a problem that every worker has found in the same message."""
        self._meet(Problem(reason, ErrorKind.RAISED, Told.KNOWN), None)

    def cut_if_alone(self) -> None:
        """If this worker has a problem, cut its connections: no vote precedes the next messages, so peers would
        wait."""
        if self.problem is not None and self.problem.told is Told.BY_VOTE:
            self.problem = replace(self.problem, told=Told.BY_CUTTING)

    def vote_to_begin(self) -> bool:
        """Whether every worker is present and without a problem. The result is the same on all workers of the old
        generation; a worker that joins gets the result of the first vote. From a result that is yes on, neither
        generation's state is complete on this worker until it has completed the migration.

        Raises:
            RuntimeError: a worker of the old generation was lost, or this worker is frozen; on a worker that joins, and
                after a loss: any worker was lost.
        """
        with self._phases.phase("begin"):
            seen, agreed = self._latch.seen, self._vote()
            if agreed:
                begun = f"workers were lost after the release switch to generation {self._generation} had begun"
                seen = replace(seen, broken=begun)
            self._latch.record(seen)
            return agreed

    def vote_to_commit(self, step: int) -> bool:
        """As `vote_to_begin`, but the result is also the same on every worker that joins. `step`: the first of the new
        generation.

        Raises:
            RuntimeError: as for `vote_to_begin`.
        """
        with self._phases.phase("vote"):
            seen = self._latch.seen
            if self.problem is None:
                # Before the ballot: where any worker sees the vote succeed, all others can still enter.
                self._latch.record(replace(seen, completed=self._generation))
                self._has_completed = True
            agreed, crew = self._vote(), self._prepared.crew
            if agreed and crew.old_rank is None:
                agreed = self._hear()
            self._latch.record(Seen(self._generation, step) if agreed else seen)
            if agreed and crew.worker == 0:
                self._tell_joiners()
            return agreed

    def _tell_joiners(self) -> None:
        told = torch.ones(1, dtype=torch.uint8, device="cpu")
        for joiner in self._prepared.crew.joining:
            try:
                self.last_sends.append(self._prepared.group.send([told], joiner, _COMMITTED_TAG))
            except RuntimeError as error:  # it is lost, which is a loss of the new generation's
                _log.warning("worker %d could not be told that it has joined: %s", joiner, one_line(error))

    @property
    def _generation(self) -> int:
        return self._prepared.generation.id

    def _vote(self) -> bool:
        ok = False
        if not self.lost_connections:
            try:
                ok = minimum(self._prepared.group, Ballot(self.problem is None, 0)).ok
            except RuntimeError as error:
                self._meet(Problem(one_line(error), kind_of(error), Told.BY_CUTTING), error)
        if self.lost_connections:
            self._cut()
        if self._old_vote is None:
            if self.lost_connections:
                raise RuntimeError(self.reason)
            return ok
        agreed = self._old_vote.cast(Ballot(ok, 0)).ok
        if ok and not agreed:
            lost = "another worker lost its connections meanwhile"
            self._meet(Problem(lost, ErrorKind.PEER_LOST, Told.BY_CUTTING), None)
            self._cut()
        return agreed

    def _hear(self) -> bool:
        """Receive the result from worker 0. If the change was not committed it sends nothing and cuts its
        connections."""
        told = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._prepared.group.recv([told], 0, _COMMITTED_TAG).wait()
        return bool(told)

    def _meet(self, problem: Problem, error: Exception | None) -> None:
        # A later problem may change how the others learn of it, but not the reason that is reported.
        self.problem = problem if self.problem is None else replace(self.problem, told=problem.told)
        # Logged at once: the agent may stop this worker before the error has propagated.
        _log.error(
            "generation %d: migration failed: %s%s", self._generation, problem.reason, self._mode.account(),
            exc_info=error if problem.told is Told.BY_VOTE else None,
        )

    def _cut(self) -> None:
        """Close the change's connections: peers that wait for this worker fail now instead of at their timeout."""
        self._prepared.connections.hang_up()
        if self._has_completed:
            return  # all else stays, since this worker may still have to enter
        self._prepared.close()
        # Schedules and tracebacks form reference cycles, and a group keeps its sockets open until it is collected.
        gc.collect()
