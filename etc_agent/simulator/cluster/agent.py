"""One simulated node: an agent that runs the real decisions, its guardian, and its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from etc_agent.parallel.config import ParallelConfig
from etc_agent.reconfig import member
from etc_agent.reconfig.fencing import FOR_EVER, NEVER, Contact, Evidence, Fencing, PeerStatus
from etc_agent.reconfig.known import parts
from etc_agent.reconfig.known.observing import JobRecords, Observer
from etc_agent.reconfig.known.records import Ack, Failure, FailureKind, NodeRecord, NodeState, Outcome
from etc_agent.reconfig.known.surroundings import Surroundings
from etc_agent.reconfig.known.view import Decision, Describe, Foresee, Policy, View, Wait, Write, is_used, uncleared
from etc_agent.reconfig.known.worker_view import WorkerView
from etc_agent.reconfig.loss.freezing import frozen_here
from etc_agent.simulator.cluster.etcd import Etcd
from etc_agent.simulator.cluster.workers import Model, Worker
from etc_agent.state.layout import Layout

_ASK_AGAIN_S = 2.0
KILLED = 137

FencingRule = Callable[[Evidence, Fencing, float], float]
"""Until when the workers of a node may live: by its evidence, the job's times, and the time of now."""


def rule(evidence: Evidence, fencing: Fencing, now: float) -> float:
    """The real one."""
    return evidence.workers_until(fencing, now)


class Outside(Protocol):
    """What an agent can reach outside its own node."""

    now: float
    policy: Policy
    fencing: Fencing
    model: Model
    etcd: Etcd

    @property
    def decide(self) -> Callable[[View], Decision]: ...

    @property
    def fencing_rule(self) -> FencingRule: ...

    def reaches_etcd(self, name: str) -> bool: ...

    def ask(self, name: str, other: str, status: PeerStatus) -> PeerStatus | None:
        """What the agent of `other` answers `name`, which says `status`; None where it does not answer."""


@dataclass
class Agent:
    """A node. `is_frozen`: its agent is stopped, but not its guardian and workers. `renewal_s`: how long etcd takes to
    answer its lease renewals."""

    name: str
    num_slots: int
    world: Outside
    life: int
    is_frozen: bool = False
    renewal_s: float = 0.0
    workers: dict[int, Worker] = field(default_factory=dict)
    records: JobRecords = field(default_factory=JobRecords)
    contact: Contact = field(default_factory=Contact)
    workers_until: float = FOR_EVER
    stepped_at: float = NEVER
    has_left: bool = False
    descriptions: dict[ParallelConfig, Layout | str] = field(default_factory=dict)
    observer: Observer = field(default_factory=Observer)
    lost_up_to: int = 0
    statuses: dict[str, PeerStatus] = field(default_factory=dict)
    _lease: int = 0
    _lease_until: float = NEVER
    _heard_at: float = NEVER
    _renewal_asked_at: float | None = None
    _seen_revision: int = -1
    _mandate: int = 0
    _look_at: float = NEVER
    _state: NodeState = NodeState.READY
    _store_port: int = 1
    _record: NodeRecord | None = None

    def drain(self) -> None:
        """The node gets SIGTERM."""
        self._state = NodeState.DRAINING

    def step(self) -> None:
        """One turn of the agent's loop, which runs several times a second."""
        now = self.world.now
        has_news = self._follow_etcd(now)
        self.contact = self.contact.at(now, self._heard_at, self.world.fencing)
        has_news |= self._heed_fence(now)
        if self._act():
            has_news = True
        if self.world.reaches_etcd(self.name) and self._lease:
            self._publish()
            self._acknowledge()
            if has_news or now >= self._look_at:
                self._look_at = self._lead(now)

    def guard(self) -> None:
        """The guardian: kills the workers when their time is over, whatever the agent does."""
        if self.world.now >= self.workers_until:
            self.kill_workers()

    def kill_workers(self) -> None:
        for worker in self.workers.values():
            if worker.is_running:
                worker.end(KILLED)

    @property
    def has_workers(self) -> bool:
        return any(worker.is_running for worker in self.workers.values())

    # ---- etcd -------------------------------------------------------------------------------------------------

    def _follow_etcd(self, now: float) -> bool:
        """Renew the lease and read what has changed; returns whether something has."""
        etcd = self.world.etcd
        if not self.world.reaches_etcd(self.name):
            self._renewal_asked_at = None
            return False
        self._heard_at = now
        if self._seen_revision != etcd.revision:
            self._seen_revision, self.records = etcd.revision, etcd.records
            self.observer = self.observer.observe(self.records, now)
        else:
            return self._renew(now)
        self._renew(now)
        return True

    def _renew(self, now: float) -> bool:
        etcd, ttl_s = self.world.etcd, self.world.fencing.ttl_s
        if self._lease and self._renewal_asked_at is None and now < self._lease_until - ttl_s * 3 / 4:
            return False
        if self._renewal_asked_at is None:
            self._renewal_asked_at = now
        if now - self._renewal_asked_at < self.renewal_s:
            return False
        asked_at, self._renewal_asked_at = self._renewal_asked_at, None
        if not self._lease or not etcd.renew(self._lease, now):
            self._lease, self._mandate, self._record = etcd.grant(now), 0, None
        self._lease_until = asked_at + ttl_s
        return True

    def _publish(self) -> None:
        """Write the node's record to etcd."""
        if is_used(f"{self.name}:{self._store_port}", self.records.generations):
            self._store_port += 1
        record = NodeRecord(
            self.name, self.name, self.num_slots, self._store_port, f"{self.name}-{self.life}", self._state,
            cleared=member.cleared(self.records.current, self.records.generations, self._views()),
        )
        if record != self._record and self.world.etcd.register(record, self._lease):
            self._record = record

    def _acknowledge(self) -> None:
        current, generations = self.records.current, self.records.generations
        views = self._views()
        frozen = frozen_here(self.name, current, generations, views)
        for generation_id in (current.committed, current.proposed):
            generation = generations.get(generation_id)
            if generation is None or not parts.participants(self.name, generation, generations):
                continue
            summary = member.summarise(self.name, generation, generations, views, self.lost_up_to, frozen)
            ack = replace(summary, contact=self.name)
            if ack != self.records.acks.get((generation_id, self.name), Ack(generation_id, self.name)):
                self.world.etcd.acknowledge(ack)

    # ---- workers ----------------------------------------------------------------------------------------------

    def _heed_fence(self, now: float) -> bool:
        if now >= self.workers_until:
            self.kill_workers()
            self.lost_up_to = self.records.current.next_id - 1
            self.life += 1
            self.workers_until = FOR_EVER
            return True
        around = Surroundings.of(self.name, self.records, has_workers=self.has_workers)
        self.workers_until = self._fence(now, around) if self.has_workers else FOR_EVER
        self._ask(around.gone)
        return False

    @property
    def status(self) -> PeerStatus:
        """What this agent says of itself now."""
        now = self.world.now
        return PeerStatus(now, self.contact.followed_s(now), self.has_workers)

    def _ask(self, others: Iterable[str]) -> None:
        for other in others:
            if (status := self.world.ask(self.name, other, self.status)) is not None:
                self.statuses[other] = status

    def _fence(self, now: float, around: Surroundings) -> float:
        fencing = self.world.fencing
        if fencing.is_in_doubt(now, self._lease_until):
            self._ask(around.others)
        evidence = Evidence(
            self._lease_until, self._heard_at, frozenset(around.others), around.companions, self.statuses,
            self.stepped_at,
        )
        return self.world.fencing_rule(evidence, fencing, now)

    def _views(self) -> dict[int, WorkerView]:
        return {index: worker.view for index, worker in self.workers.items()}

    def _act(self) -> bool:
        records, world = self.records, self.world
        actions = member.owed(
            self.name, records.current, records.generations, self._views(), self.lost_up_to,
            uncleared(self.view()),
        )
        for action in actions:
            match action:
                case member.Start(index, generation, joining):
                    self.workers[index] = Worker.started(index, generation, world.model, joining=joining)
                    if self.workers_until == FOR_EVER:
                        around = Surroundings.of(self.name, records, has_workers=True)
                        self.workers_until = self._fence(world.now, around)
                case member.Stop(index):
                    self.workers[index].stop(world.now, world.model.stop_s)
                case member.Expect(index):
                    self.workers[index].stop(world.now, world.model.stop_s + 1)
                case member.Kill(index):
                    self.workers[index].fail(Failure(f"{self.name}/{index}", FailureKind.KILLED, KILLED, "killed"))
                case member.Tell(index, generation_id, message):
                    self.workers[index].hear(generation_id, message, world.model)
        return bool(actions)

    # ---- the lead ---------------------------------------------------------------------------------------------

    def _lead(self, now: float) -> float:
        """Decide once, if this agent leads. Returns when to look again if nothing changes."""
        world, fencing = self.world, self.world.fencing
        if not self.observer.may_lead(self.name, self.records, now, fencing.lease_s):
            if self._mandate:
                self._mandate = 0
                world.etcd.resign()
            return now
        self._mandate = world.etcd.campaign(self.name, self._lease)
        if not self._mandate or now >= self._lease_until:
            return now
        match world.decide(self.view()):
            case Wait(seconds):
                return now + seconds
            case Describe(config):
                if any(worker.is_running and worker.answers for worker in self.workers.values()):
                    self.descriptions[config] = world.model.describe(config)
                    return now
                return now + _ASK_AGAIN_S
            case Foresee(configs, wait):
                if any(worker.is_running and worker.answers for worker in self.workers.values()):
                    self.descriptions.update((config, world.model.describe(config)) for config in configs)
                return now + min(wait.seconds, _ASK_AGAIN_S)
            case Write() as write:
                world.etcd.transact(write, self._mandate, self.records.current_revision)
        return now

    def view(self) -> View:
        """The view from which this agent would decide now."""
        now = self.world.now
        alive_at = {name: status.at for name, status in self.statuses.items() if status.has_workers}
        connected_s = self.contact.followed_s(now)
        return self.observer.view(
            self.world.policy, self.records, self.descriptions, now, connected_s, alive_at, time=now
        )

    # ---- what a test asks -------------------------------------------------------------------------------------

    def fail(self, index: int, kind: FailureKind) -> None:
        """The worker in slot `index` ends with an error."""
        self.workers[index].fail(Failure(f"{self.name}/{index}", kind, 1, "it failed"))

    @property
    def is_done(self) -> bool:
        """Whether its agent can end: the job is over, or the node was told to leave and has left."""
        current = self.records.current
        if self.has_workers:
            return False
        if current.outcome is not Outcome.RUNNING:
            return True
        members = [self.records.generations.get(g) for g in (current.committed, current.proposed)]
        is_leaving = self._state is NodeState.DRAINING or self.name in self.records.drains
        return is_leaving and not any(g is not None and self.name in g.nodes for g in members)

    def leave(self) -> None:
        """The agent ends normally."""
        self.has_left = True
        if self._lease and self.world.reaches_etcd(self.name) and self.world.etcd.renew(self._lease, self.world.now):
            self.world.etcd.revoke(self._lease)
