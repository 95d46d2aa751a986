"""From the job's records and the present time to the leader's `View`: since when everything has been as it is.

Every agent keeps one `Observer` and shows it each change of the records, so that its times are right when the agent
becomes the leader. The caller passes the time: an agent time.monotonic(), the simulated cluster its own clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.records import Ack, Current, History, NodeRecord, Outcome, Reply, Request, Testimony
from etc_agent.reconfig.known.view import Policy, View
from etc_agent.reconfig.past.account import Account
from etc_agent.reconfig.past.goodput import Goodput
from etc_agent.reconfig.sizes.controls import Cordon, Order
from etc_agent.state.layout import Layout


@dataclass(frozen=True, slots=True)
class JobRecords:
    """All records under the job's prefix at one revision.

    `current_revision`: the mod_revision of `current`, 0 where it does not exist yet; the leader's next write compares
    it. `drains`: node -> seconds that it may take to leave, None where none were given. `stop`: an administrator's
    order to end the job, if there is one. `account`: of what is no longer in `history`. `goodput`: as the leader last
    wrote it into ``status``. `gone`: node -> its testimony.
    `preview`: one that is asked for and not yet answered.
    """

    incarnation: str = ""
    nodes: tuple[NodeRecord, ...] = ()
    leader: str = ""
    current: Current = field(default_factory=Current)
    current_revision: int = 0
    generations: Mapping[int, Generation] = field(default_factory=dict)
    acks: Mapping[tuple[int, str], Ack] = field(default_factory=dict)
    scale: Request | None = None
    drains: Mapping[str, float | None] = field(default_factory=dict)
    paused: bool = False
    cordons: tuple[Cordon, ...] = ()
    stop: Order | None = None
    preview: Request | None = None
    reply: Reply | None = None
    history: Mapping[int, History] = field(default_factory=dict)
    account: Account = field(default_factory=Account)
    goodput: Goodput | None = None
    gone: Mapping[str, Testimony] = field(default_factory=dict)

    @property
    def account_now(self) -> Account:
        """The account of the whole life of the job."""
        return self.account + Account.of(self.history.values())


@dataclass(frozen=True, slots=True)
class Lasting:
    """A value, and since when it has had that value, in seconds of the caller's clock."""

    value: object = None
    since: float = 0.0

    def at(self, now: float, value: object) -> Self:
        return self if value == self.value else replace(self, value=value, since=now)


@dataclass(frozen=True, slots=True)
class Observer:
    """Since when the facts that decisions wait for have been as they are.

    `nodes`: which nodes are present, which instance of each, and their states. `current`: the record of that name.
    `failed`: the committed generation, if a worker of it or of a later one has failed or has lost a peer, else None.
    `refused`: likewise the proposed one, if a worker refused it or has ended in it. `led`: whether there is a leader.
    `gone_at`: node -> when it was first seen to be gone, for every node that was ever present and is not now.
    `cleared`, `instances`: node -> that field of its last record.
    """

    nodes: Lasting = Lasting()
    current: Lasting = Lasting()
    failed: Lasting = Lasting()
    refused: Lasting = Lasting()
    led: Lasting = Lasting()
    present: frozenset[str] = frozenset()
    gone_at: Mapping[str, float] = field(default_factory=dict)
    cleared: Mapping[str, int] = field(default_factory=dict)
    instances: Mapping[str, str] = field(default_factory=dict)

    def observe(self, records: JobRecords, now: float) -> Observer:
        """The observer after it has seen `records` at time `now`."""
        committed = records.current.committed
        has_failed = any(
            ack.failure or ack.peer_lost for (generation, _), ack in records.acks.items() if generation >= committed
        )
        proposed = records.current.proposed
        is_refused = any(
            ack.refusal or ack.failure for (generation, _), ack in records.acks.items() if generation == proposed
        )
        present = frozenset(node.name for node in records.nodes)
        gone = {*self.gone_at, *self.present} - present
        return Observer(
            self.nodes.at(now, frozenset((node.name, node.instance, node.state) for node in records.nodes)),
            self.current.at(now, records.current),
            self.failed.at(now, committed if has_failed else None),
            self.refused.at(now, proposed if is_refused else None),
            self.led.at(now, records.leader != ""),
            present,
            {name: self.gone_at.get(name, now) for name in gone},
            {**self.cleared, **{node.name: node.cleared for node in records.nodes}},
            {**self.instances, **{node.name: node.instance for node in records.nodes}},
        )

    def view(
        self,
        policy: Policy,
        records: JobRecords,
        descriptions: Mapping[ParallelConfig, Layout | str],
        now: float,
        connected_s: float,
        alive_at: Mapping[str, float],
        undescribed: Mapping[ParallelConfig, str] | None = None,
        time: float = 0.0,
    ) -> View:
        """The leader's view at time `now`. `records`: those observed last. `alive_at`: node -> when its agent last
        said, asked directly, that it has workers. The other arguments: as in `View`."""
        return View(
            policy,
            records.nodes,
            records.current,
            records.generations,
            records.acks,
            records.scale,
            frozenset(records.drains),
            records.paused,
            descriptions,
            quiet_s=now - self.nodes.since,
            phase_s=now - self.current.since,
            failed_s=now - self.failed.since if self.failed.value is not None else 0.0,
            connected_s=connected_s,
            absent_s={name: now - at for name, at in self.gone_at.items()},
            refused_s=now - self.refused.since if self.refused.value is not None else 0.0,
            undescribed=undescribed or {},
            alive_s={name: now - at for name, at in alive_at.items() if name not in self.present},
            cleared=self.cleared,
            stop=records.stop,
            cordons=records.cordons,
            time=time,
            testified=frozenset(name for name in self.gone_at if self._has_testified(name, records)),
        )

    def _has_testified(self, node: str, records: JobRecords) -> bool:
        """Whether the last instance of a node that is gone is known to have no workers any more."""
        said = records.gone.get(node)
        return said is not None and said.instance == self.instances.get(node)

    def may_lead(self, node: str, records: JobRecords, now: float, patience_s: float) -> bool:
        """Whether `node` should stand for the lead, or keep it: the leader asks workers of its own about the model, so
        where nodes with workers are here, another stands only when there has been no leader for `patience_s`."""
        committed = records.generations.get(records.current.committed)
        if committed is None or records.current.outcome is not Outcome.RUNNING:
            return True
        loss = records.current.loss
        gone = map(Slot.parse, loss.slots) if loss is not None else ()
        members = {slot.node for slot in set(committed.placement).difference(gone)}
        if node in members or self.present.isdisjoint(members):
            return True
        return not self.led.value and now - self.led.since > patience_s
