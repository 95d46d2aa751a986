"""Fencing: until when the workers of a node that has lost etcd may run, so that none run when others take over.

A node's record in etcd is under a lease of `ttl_s` seconds, which its agent renews every quarter of that time. When no
renewal succeeds, etcd removes the record, and the leader, on any node that hears etcd, gives the node's work to others
`fence_s` after it saw the record disappear. By then the node must have stopped its workers, whatever has failed: the
network to etcd, the network to other nodes, one direction only, or the agent itself (then its guardian, another
process, stops the workers in time).

While etcd is unreachable for *everybody*, nobody can take over, and training continues. A node that cannot renew its
lease tells the two cases apart by asking all other nodes how long they have followed etcd without interruption
(`Contact`). A leader believes that a node is gone only when it has followed etcd for `trust_s` without interruption. So
each answer gives a time before which that peer cannot have taken over (`PeerStatus.safe_until`), and the workers may
run until the earliest of these times over all other nodes. One peer that has followed etcd all the time means that this
node is cut off. A peer that does not answer may have taken over, unless it has workers in the same generation and steps
complete: a step needs that peer's workers too.

A node that joined after this one had lost etcd is not known here. It asks instead: whoever may have to take over asks
the nodes that are gone whether they still have workers, and waits `trust_s` after the last one that says so. Its
question also tells them that it hears etcd itself.

A majority of answers is not the criterion: where etcd is on the smaller side of a network partition, the larger side
would continue to train beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

FOR_EVER = float("inf")
NEVER = float("-inf")

_MARGIN = 0.2
_LEAST_S = 1.0
_TRUST_S = 2.0


@dataclass(frozen=True, slots=True)
class Fencing:
    """The times of a job in which a silent node is considered lost after `lease_s` seconds."""

    lease_s: float

    @property
    def fence_s(self) -> float:
        """From the end of a node's lease until its workers have certainly ended."""
        return max(_LEAST_S, _MARGIN * self.lease_s)

    @property
    def ttl_s(self) -> int:
        """The lease's time to live: `lease_s` less `fence_s`. etcd needs whole seconds."""
        return max(1, math.floor(self.lease_s - self.fence_s))

    @property
    def silence_s(self) -> float:
        """Contact with etcd counts as lost after this many seconds without hearing from it: twice the renewal period,
        and short enough that every node notices an outage of etcd before the first lease ends."""
        return self.ttl_s / 2

    @property
    def trust_s(self) -> float:
        """How long an agent must have followed etcd without interruption before it believes that a node is gone: a node
        that was cut off for the same time may be about to renew its lease."""
        return self.lease_s + _TRUST_S

    @property
    def steps_s(self) -> float:
        """A step that completed longer ago than this no longer shows that the workers of other nodes are running."""
        return self.ttl_s * 2 / 3

    def is_in_doubt(self, now: float, lease_until: float) -> bool:
        """Whether a renewal is overdue, so that the other nodes should be asked."""
        return lease_until - now < self.silence_s


@dataclass(frozen=True, slots=True)
class Contact:
    """Since when this agent has followed etcd without interruption; None while etcd is silent. There is one value per
    agent, updated several times a second, so that what it tells its peers and what its own leader decides from agree.
    """

    since: float | None = None

    def at(self, now: float, heard_at: float, fencing: Fencing) -> Self:
        """The value at time `now`. `heard_at`: when etcd last answered."""
        if now - heard_at > fencing.silence_s:
            return replace(self, since=None)
        return self if self.since is not None else replace(self, since=now)

    def followed_s(self, now: float) -> float:
        """For how many seconds, 0 while etcd is silent."""
        return 0.0 if self.since is None else now - self.since


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """What one agent tells another: for how long it has followed etcd (`Contact.followed_s`), and whether it has
    workers. `at`: when we began to ask, or were asked, by our clock; the statement was true at that time or later.
    `step`: the next step that its workers had when they last told, for people who look; None before the first."""

    at: float
    followed_s: float
    has_workers: bool = False
    step: int | None = None

    @property
    def hears_etcd(self) -> bool:
        return self.followed_s > 0

    def safe_until(self, fencing: Fencing) -> float:
        """Workers that end by this time have ended `fence_s` before that agent can take over, according to what it
        said.
        """
        return self.at + fencing.trust_s - self.followed_s - fencing.fence_s


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a node knows about etcd and the other nodes; times in seconds of its own clock.

    `lease_until`: until when its lease is certainly valid. `heard_at`: when etcd last answered. `nodes`: all other
    nodes of the job as etcd showed them then. `companions`: those of them that have workers in the same generation.
    `statuses`: agent -> what it said last. `stepped_at`: when a worker of this node last completed a step.
    """

    lease_until: float
    heard_at: float = NEVER
    nodes: frozenset[str] = frozenset()
    companions: frozenset[str] = frozenset()
    statuses: Mapping[str, PeerStatus] = field(default_factory=dict)
    stepped_at: float = NEVER

    @property
    def others(self) -> frozenset[str]:
        """The nodes that may take over: those that etcd showed, and those that have contacted this node since."""
        came = (name for name, status in self.statuses.items() if status.hears_etcd and status.at > self.heard_at)
        return self.nodes.union(came)

    def workers_until(self, fencing: Fencing, now: float) -> float:
        """Until when the workers of this node may run, as far as is known now.

        Without another node nobody can take over; a node that joins later asks this agent first.
        """
        safe = (self.safe_until(other, fencing) for other in self.others)
        return max(self.lease_until, min(safe, default=now + fencing.trust_s - fencing.fence_s))

    def why(self, fencing: Fencing, now: float) -> str:
        """Why the workers have to end when their time is over; for people."""
        silent_s = now - self.lease_until + fencing.ttl_s
        silent = f"etcd has not answered for {silent_s:.0f} s"
        if not self.others:
            return silent
        first = min(sorted(self.others), key=lambda other: self.safe_until(other, fencing))
        hears = first in self.statuses and self.statuses[first].hears_etcd
        return f"{silent}, and node {first} {'hears it' if hears else 'does not answer either'}"

    def safe_until(self, other: str, fencing: Fencing) -> float:
        """The time before which `other` cannot take over."""
        status = self.statuses.get(other)
        said = status.safe_until(fencing) if status else NEVER
        if other not in self.companions or (status and status.hears_etcd):
            return said
        return max(said, self.stepped_at + fencing.steps_s)
