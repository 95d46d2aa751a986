"""Until when the workers of a node that has lost etcd may live, so that none are left when others go on without it.

A node's record in etcd hangs on a lease of `ttl_s` seconds that its agent renews every quarter of it. When no renewal
succeeds, the record goes, and the leader, who may be any node that hears etcd, gives the node's work to others
`fence_s` after it saw the record go. By then the node must have stopped its workers, whatever has failed: the network
to etcd, to other nodes, in one direction only, or the agent itself (its guardian, another process, keeps the time).

While etcd is away from *everybody*, nobody can take over, and training goes on. A node that cannot renew tells that
apart by asking all other nodes how long they have followed etcd without a break (`Contact`). A leader believes that a
node is gone only when it has followed etcd for `trust_s` without a break, so each answer says until when that peer
cannot have taken over (`Word.safe_until`), and the workers may live until the earliest of these times over all other
nodes. One peer that has followed etcd all the time means that this node is cut off. A peer that does not answer may
have taken over, unless it has workers in the same generation and steps go on, which need its workers too.

A node that joined when this one had lost etcd already is unknown here. It asks in its turn: whoever may have to take
over asks the nodes that are gone whether they still have workers, waits `trust_s` after the last one that says so, and
tells with its question that it hears etcd itself.

A majority of answers would not do: where etcd is on the smaller side of a cut, the larger side would train on beside
it.
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
    def silence_s(self) -> float:
        """Contact with etcd is lost when it has not been heard for so long. Renewals come twice as often, and when
        etcd goes away from everybody, every node notices before the first lease is over."""
        return self.ttl_s / 2

    @property
    def trust_s(self) -> float:
        """For so long an agent must have followed etcd without a break before it believes that a node is gone: a node
        that was away just as long may be about to renew its lease."""
        return self.lease_s + _TRUST_S

    @property
    def steps_s(self) -> float:
        """A step that ended so long ago says nothing about the workers of other nodes any more."""
        return self.ttl_s * 2 / 3

    def is_in_doubt(self, now: float, lease_until: float) -> bool:
        """Whether a renewal is overdue, so that the other nodes should be asked."""
        return lease_until - now < self.silence_s


@dataclass(frozen=True, slots=True)
class Contact:
    """Since when this agent has followed etcd without a break; None while etcd is silent. One value per agent, brought
    up to date several times a second: what is published to peers and what its own leader's half goes by are the same.
    """

    since: float | None = None

    def at(self, now: float, heard_at: float, fencing: Fencing) -> Self:
        """`heard_at`: when etcd last said anything."""
        if now - heard_at > fencing.silence_s:
            return replace(self, since=None)
        return self if self.since is not None else replace(self, since=now)

    def followed_s(self, now: float) -> float:
        """For how long; 0 while etcd is silent."""
        return 0.0 if self.since is None else now - self.since


@dataclass(frozen=True, slots=True)
class Word:
    """What one agent says to another, asked or asking: for how long it has followed etcd (`Contact.followed_s`), and
    whether it has workers. `at`: when it was asked, or asked us, by our clock; what it said was true then or later."""

    at: float
    followed_s: float
    has_workers: bool = False

    @property
    def hears_etcd(self) -> bool:
        return self.followed_s > 0

    def safe_until(self, fencing: Fencing) -> float:
        """Workers that end by this time have ended `fence_s` before that agent can take over, by what it said."""
        return self.at + fencing.trust_s - self.followed_s - fencing.fence_s


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a node knows of the rest of the world, in seconds of its own clock.

    `lease_until`: until when its lease is certainly held. `heard_at`: when etcd last said anything. `nodes`: all other
    nodes of the job as etcd showed them then. `companions`: those of them that have workers in the same generation.
    `words`: the last word of each agent. `stepped_at`: when a worker of this node last ended a step.
    """

    lease_until: float
    heard_at: float = NEVER
    nodes: frozenset[str] = frozenset()
    companions: frozenset[str] = frozenset()
    words: Mapping[str, Word] = field(default_factory=dict)
    stepped_at: float = NEVER

    @property
    def others(self) -> frozenset[str]:
        """The nodes that may take over: those that etcd showed, and those that have shown up since."""
        came = (name for name, word in self.words.items() if word.hears_etcd and word.at > self.heard_at)
        return self.nodes.union(came)

    def workers_until(self, fencing: Fencing, now: float) -> float:
        """Until when the workers of this node may live, unless there is news until then.

        Where there is nobody to take over, who may come later asks first: this agent has to be there to answer.
        """
        safe = (self.safe_until(other, fencing) for other in self.others)
        return max(self.lease_until, min(safe, default=now + fencing.trust_s - fencing.fence_s))

    def why(self, fencing: Fencing, now: float) -> str:
        """Why the workers have to end, once their time is over; for people."""
        silent_s = now - self.lease_until + fencing.ttl_s
        silent = f"etcd has not answered for {silent_s:.0f} s"
        if not self.others:
            return silent
        first = min(sorted(self.others), key=lambda other: self.safe_until(other, fencing))
        hears = first in self.words and self.words[first].hears_etcd
        return f"{silent}, and node {first} {'hears it' if hears else 'does not answer either'}"

    def safe_until(self, other: str, fencing: Fencing) -> float:
        """As far as `other` is concerned."""
        word = self.words.get(other)
        said = word.safe_until(fencing) if word else NEVER
        if other not in self.companions or (word and word.hears_etcd):
            return said
        return max(said, self.stepped_at + fencing.steps_s)
