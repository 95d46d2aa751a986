"""How the workers of a change find out together what comes of it, also when one is lost meanwhile.

    vote of all workers -> vote of the old generation's workers -> old rank 0 tells those that join

A worker that is lost during the first vote leaves some with its result and others with an error. The second vote has
the old generation's own connections and settles it: either all of them saw the first one succeed, or all stay. So the
loss of a worker that joins costs the others no more than the time; where one of the old generation is lost, that
generation cannot train on anyway.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from etc_agent.worker.change.prepare import PreparedGeneration, one_line
from etc_agent.worker.change.releasing import what_is_lost
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.vote import Ballot, minimum

_log = logging.getLogger(__name__)

T = TypeVar("T")

_SETTLED_TAG = 2


class Settlement:
    """One worker's side; `live` is None on a worker that joins.

    Attributes:
        error: what broke the change's connections as seen from here, "" while they hold.
        lost: what this worker had given up when they broke, for people; "" where that is nothing.
        farewells: messages to the workers that join, still on their way.
    """

    def __init__(self, prepared: PreparedGeneration, live: LiveGeneration | None) -> None:
        self._prepared = prepared
        self._live = live
        self.error = self.lost = ""
        self.farewells: list[dist.Work] = []

    def attempt(self, work: Callable[[], T]) -> T | None:
        """The result of `work` over the change's connections, or None where an error ended it and so the change."""
        try:
            return work()
        except RuntimeError as error:
            self.give_up(one_line(error))
            self.lost = what_is_lost(self._prepared)
            # At once: the agent may stop this worker before the error comes through.
            _log.error("generation %d: migration failed: %s%s", self._prepared.generation.id, self.error, self.lost)
            return None

    def give_up(self, error: str) -> None:
        """This worker's part cannot be done, and others may be waiting for it."""
        self.error = self.error or error

    def agree(self, ok: bool) -> bool:
        """Whether every worker is there and says `ok`: the same on all workers of the old generation. One that joins
        is told what it sees itself.

        Raises:
            RuntimeError: a worker of the old generation was lost, or, where this one joins, any.
        """
        if not self.error:
            ok = bool(self.attempt(lambda: minimum(self._prepared.group, Ballot(ok, 0)).ok))
        if self.error:
            ok = False
            self._let_go()
        if self._live is None:
            if self.error:
                raise RuntimeError(self.error)
            return ok
        assert self._live.vote is not None, "a job without an agent does not change"
        agreed = self._live.vote.cast(Ballot(ok, 0)).ok
        if ok and not agreed:
            self.error, self.lost = "another worker lost its connections meanwhile", what_is_lost(self._prepared)
            self._let_go()
        return agreed

    def settle(self, ok: bool) -> bool:
        """As `agree`, and the same on every worker that joins, too.

        Raises:
            RuntimeError: as for `agree`.
        """
        agreed = self.agree(ok)
        group, crew = self._prepared.group, self._prepared.crew
        if self._live is None:
            return agreed and self._hear()
        if agreed and crew.worker == 0:
            settled = torch.ones(1, dtype=torch.uint8, device="cpu")
            self.farewells = [group.send([settled], joiner, _SETTLED_TAG) for joiner in crew.joining]
        return agreed

    def _hear(self) -> bool:
        """Of old rank 0, which says nothing and lets go of its connections where it was not settled."""
        settled = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._prepared.group.recv([settled], 0, _SETTLED_TAG).wait()
        return bool(settled)

    def _let_go(self) -> None:
        """Of the connections: whoever waits for this worker hears of it now, not when its patience ends."""
        self._prepared.close()
        # Schedules and errors refer to each other in circles, and a kept group keeps its sockets.
        gc.collect()
