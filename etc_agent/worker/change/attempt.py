"""One worker's attempt to enter a prepared generation: what goes wrong, and the votes on what comes of it.

    vote of all workers -> vote of the old generation's workers -> old rank 0 tells those that join

A worker that is lost during the first vote leaves some with its result and others with an error. The second vote has
the old generation's own connections and decides: either all of them saw the first one succeed, or all stay. So the
loss of a worker that joins costs the others no more than the time; where one of the old generation is lost, that
generation cannot train on anyway.
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
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.vote import Ballot, minimum

_log = logging.getLogger(__name__)

T = TypeVar("T")

_COMMITTED_TAG = 2


class Told(Enum):
    """How the other workers learn of a problem."""

    KNOWN = "all of them have found the same"
    BY_VOTE = "this worker says so in the next vote"
    BY_CUTTING = "they may be waiting for messages of this worker: its connections are cut"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why this worker cannot enter the generation: `reason` is for people."""

    reason: str
    kind: ErrorKind
    told: Told


class Attempt:
    """One worker's attempt; `live` is None on a worker that joins.

    Attributes:
        problem: the first thing that went wrong here; the parts after it are left out.
        last_sends: messages to the workers that join, still on their way.
    """

    def __init__(self, prepared: PreparedGeneration, live: LiveGeneration | None, phases: Phases) -> None:
        self._prepared = prepared
        self._mode = prepared.mode
        self._live = live
        self._phases = phases
        self.problem: Problem | None = None
        self.last_sends: list[dist.Work] = []

    @property
    def reason(self) -> str:
        """Why this worker cannot enter, "" where it can."""
        return self.problem.reason if self.problem is not None else ""

    @property
    def kind(self) -> ErrorKind:
        """Of that problem. Where there is none here, it is another worker's."""
        return self.problem.kind if self.problem is not None else ErrorKind.PEER_LOST

    @property
    def lost_connections(self) -> bool:
        return self.problem is not None and self.problem.told is Told.BY_CUTTING

    def do(self, phase: str, work: Callable[[], T]) -> T | None:
        """The result of a part that needs no other worker; None where it fails, or where something has already."""
        return self._do(work, Told.BY_VOTE, phase)

    def talk(self, work: Callable[[], T]) -> T | None:
        """`do` for a part in which workers wait for each other, and which times its own phases."""
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
        """A problem that every worker has found in the same message."""
        self._meet(Problem(reason, ErrorKind.RAISED, Told.KNOWN), None)

    def cut_if_alone(self) -> None:
        """No vote comes before the next messages: if this worker cannot take part, cut connections have to tell."""
        if self.problem is not None and self.problem.told is Told.BY_VOTE:
            self.problem = replace(self.problem, told=Told.BY_CUTTING)

    def vote_to_begin(self) -> bool:
        """Whether every worker is there and without a problem: the same on all workers of the old generation. One that
        joins is told what it sees itself.

        Raises:
            RuntimeError: a worker of the old generation was lost, or, where this one joins, any.
        """
        with self._phases.phase("begin"):
            return self._vote()

    def vote_to_commit(self) -> bool:
        """As `vote_to_begin`, and the same on every worker that joins, too.

        Raises:
            RuntimeError: as for `vote_to_begin`.
        """
        with self._phases.phase("vote"):
            agreed = self._vote()
            group, crew = self._prepared.group, self._prepared.crew
            if self._live is None:
                return agreed and self._hear()
            if agreed and crew.worker == 0:
                told = torch.ones(1, dtype=torch.uint8, device="cpu")
                self.last_sends = [group.send([told], joiner, _COMMITTED_TAG) for joiner in crew.joining]
            return agreed

    def _vote(self) -> bool:
        ok = False
        if not self.lost_connections:
            try:
                ok = minimum(self._prepared.group, Ballot(self.problem is None, 0)).ok
            except RuntimeError as error:
                self._meet(Problem(one_line(error), kind_of(error), Told.BY_CUTTING), error)
        if self.lost_connections:
            self._cut()
        if self._live is None:
            if self.lost_connections:
                raise RuntimeError(self.reason)
            return ok
        assert self._live.vote is not None, "a job without an agent does not change"
        agreed = self._live.vote.cast(Ballot(ok, 0)).ok
        if ok and not agreed:
            lost = "another worker lost its connections meanwhile"
            self._meet(Problem(lost, ErrorKind.PEER_LOST, Told.BY_CUTTING), None)
            self._cut()
        return agreed

    def _hear(self) -> bool:
        """From old rank 0, which says nothing and cuts its connections where the change was not committed."""
        told = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._prepared.group.recv([told], 0, _COMMITTED_TAG).wait()
        return bool(told)

    def _meet(self, problem: Problem, error: Exception | None) -> None:
        # A later one may change how the others learn of it, not what it is.
        self.problem = problem if self.problem is None else replace(self.problem, told=problem.told)
        # At once: the agent may stop this worker before the error comes through.
        _log.error(
            "generation %d: migration failed: %s%s", self._prepared.generation.id, problem.reason, self._mode.account(),
            exc_info=error if problem.told is Told.BY_VOTE else None,
        )

    def _cut(self) -> None:
        """Close the change's connections: whoever waits for this worker hears of it now, not at its timeout."""
        self._prepared.close()
        # Schedules and errors refer to each other in circles, and a kept group keeps its sockets.
        gc.collect()
