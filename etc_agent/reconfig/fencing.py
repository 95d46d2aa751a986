"""When a node that is cut off from etcd must stop its workers, so that none are left when the others go on without it.

Times, with a lease of `ttl_s` seconds that is renewed every third of it, counted from the last renewal:

    0                 the last renewal; the cut comes before ttl_s/3, or the next one would have got through
    ttl_s/2           the node begins to ask other nodes whether they are there
    ttl_s             the lease may be over. A node that was cut off before ttl_s/3 has seen neither a step end nor an
                      answer for two thirds of ttl_s, and kills its workers
    ttl_s + fence_s   the others, who saw the lease end at ttl_s or later, believe that the workers are gone

While etcd alone is away, the other nodes answer and training goes on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MARGIN = 0.2
_LEAST_S = 1.0
_QUIET = 2 / 3
_DOUBT = 1 / 2


@dataclass(frozen=True, slots=True)
class Fencing:
    """The times of a job in which a silent node is given up after `lease_s` seconds."""

    lease_s: float

    @property
    def fence_s(self) -> float:
        """From the end of a node's lease until its workers are certainly gone."""
        return max(_LEAST_S, _MARGIN * self.lease_s)

    @property
    def ttl_s(self) -> int:
        """The lease's own time: what `lease_s` leaves for it. etcd wants whole seconds."""
        return max(1, math.floor(self.lease_s - self.fence_s))

    @property
    def quiet_s(self) -> float:
        """No step and no answer for so long mean that there are none."""
        return _QUIET * self.ttl_s

    def is_in_doubt(self, lease_left_s: float) -> bool:
        """Whether a renewal is overdue, so that the other nodes should be asked."""
        return lease_left_s < _DOUBT * self.ttl_s


@dataclass(frozen=True, slots=True)
class Isolation:
    """What a node knows of the rest of the world.

    `has_others`: there were other nodes when etcd was last heard; nobody else would ever take over. `is_shared`: the
    node's generation has workers on others of them; where it has not, steps that end prove nothing. `lease_left_s`:
    until the node's lease may be over. `unanswered_s`: since most of the job's nodes were last in reach, etcd counting
    for all of them. `stalled_s`: since a worker last ended a step or sent a heartbeat; inf for scripts that do neither.
    """

    has_others: bool
    is_shared: bool
    lease_left_s: float
    unanswered_s: float
    stalled_s: float

    def must_stop(self, fencing: Fencing) -> bool:
        """Whether the others may be about to go on without this node, so that its workers have to end now."""
        if not self.has_others or self.lease_left_s > 0 or self.unanswered_s < fencing.quiet_s:
            return False
        return self.stalled_s >= fencing.quiet_s or not self.is_shared


def are_in_reach(num_asked: int, num_answered: int) -> bool:
    """Whether this node is among most nodes: of itself and the `num_asked` others, more than half are here. Of two
    nodes on one side of a cut, neither may take the other for the job."""
    return 2 * (num_answered + 1) > num_asked + 1
