"""etcd as the agents of one job see it: records with a revision, leases that expire, and fenced transactions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from etc_agent.reconfig.known.observing import JobRecords
from etc_agent.reconfig.known.records import Ack, History, NodeRecord, Reply, Request
from etc_agent.reconfig.known.view import Write


@dataclass
class Etcd:
    """One simulated etcd. `World` decides which callers can reach it.

    `records`: what a watch would show now. `revision`: grows with every change of the records. `replies`: every answer
    ever written to ``control/reply``.
    """

    ttl_s: float
    records: JobRecords = field(default_factory=JobRecords)
    revision: int = 0
    is_up: bool = True
    replies: list[Reply] = field(default_factory=list)
    history: dict[int, History] = field(default_factory=dict)
    _leases: dict[int, float] = field(default_factory=dict)
    _of_node: dict[str, int] = field(default_factory=dict)
    _of_leader: int = 0
    _mandate: int = 0

    def change(self, **fields: object) -> None:
        """Put records."""
        self.revision += 1
        self.records = replace(self.records, **fields)  # type: ignore[arg-type]

    # ---- leases -----------------------------------------------------------------------------------------------

    def grant(self, now: float) -> int:
        """A new lease."""
        self.revision += 1
        self._leases[self.revision] = now + self.ttl_s
        return self.revision

    def renew(self, lease: int, now: float) -> bool:
        """Give the lease its full time again; returns whether it still exists."""
        if lease in self._leases:
            self._leases[lease] = now + self.ttl_s
        return lease in self._leases

    def expire(self, now: float) -> None:
        """Remove the leases that have expired, and their keys."""
        for lease in [lease for lease, until in self._leases.items() if until < now]:
            self.revoke(lease)

    def revoke(self, lease: int) -> None:
        del self._leases[lease]
        for name in [name for name, other in self._of_node.items() if other == lease]:
            del self._of_node[name]
            self.change(nodes=tuple(node for node in self.records.nodes if node.name != name))
        if self._of_leader == lease:
            self.resign()

    def start_again(self, now: float) -> None:
        """After an outage: every lease gets its full time again."""
        self.is_up = True
        self._leases = {lease: now + self.ttl_s for lease in self._leases}

    # ---- nodes and the lead -----------------------------------------------------------------------------------

    def register(self, record: NodeRecord, lease: int) -> bool:
        """Create or replace the node's record under `lease`; False if the lease is gone, or another node has the
        name."""
        if lease not in self._leases or self._of_node.get(record.name, lease) != lease:
            return False
        before = {node.name: node for node in self.records.nodes}
        joined = before[record.name].joined if record.name in before else self.revision + 1
        self._of_node[record.name] = lease
        self.change(nodes=tuple({**before, record.name: replace(record, joined=joined)}.values()))
        return True

    def campaign(self, name: str, lease: int) -> int:
        """Take the lead if nobody has it. Returns the mandate if `name` leads under `lease`, else 0."""
        if not self._of_leader and lease in self._leases:
            self._of_leader = lease
            self.change(leader=name)
            self._mandate = self.revision
        return self._mandate if self._of_leader == lease else 0

    def resign(self) -> None:
        """Give the lead back."""
        self._of_leader = 0
        self.change(leader="")

    # ---- what nodes and the leader write ----------------------------------------------------------------------

    def acknowledge(self, ack: Ack) -> None:
        self.change(acks={**self.records.acks, (ack.generation, ack.node): ack})

    def ask(self, text: str) -> Request:
        """An administrator writes ``control/scale``."""
        request = Request(text, self.revision + 1)
        self.change(scale=request)
        return request

    def transact(self, write: Write, mandate: int, known_revision: int) -> bool:
        """The leader's fenced transaction; returns whether it was applied."""
        if mandate != self._mandate or not self._of_leader or known_revision != self.records.current_revision:
            return False
        generations = dict(self.records.generations)
        if write.generation is not None:
            assert write.generation.id not in generations, "a generation's number was used twice"
            generations[write.generation.id] = write.generation
        if write.reply is not None:
            self.replies.append(write.reply)
        if write.history is not None:
            self.history[write.history.generation] = write.history
        if write.cordons:
            self.change(cordons=(*self.records.cordons, *write.cordons))
        self.change(current=write.current, generations=generations, current_revision=self.revision + 1)
        return True
