"""The input of a decision and the possible decisions, as plain values: the agent reads and executes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from etc_agent.control.redundancy import Redundancy
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Node, Slot, Topology
from etc_agent.reconfig.known.records import Ack, Current, History, NodeRecord, NodeState, Reply, Request
from etc_agent.reconfig.sizes.controls import Cordon, Order
from etc_agent.state.layout import Layout


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules and limits of the job, from its settings. Times in seconds.

    `num_slots`: of the leader's own node. Each node's record has its own number; this one is assumed for nodes that
    have not joined yet.
    `initial`: the config to start with, wanted until another is requested; None for the largest.
    `allowed`: the only configs to choose from, or None for all.
    `refuse`: config -> why it is never possible, in one line, or None; from the job file. The model is asked later.
    `alike_failures`: this many equal failures before the first step end the job, whatever is left of `max_restarts`; 0:
    no limit.
    `redundancy`: of the workers' state.
    `pack`: whether to use as few nodes as possible; None: only when shrinking.
    `settle_s`: how long the set of nodes must be unchanged before nodes that joined are used.
    `prepare_s`: longest time for a proposed generation to be prepared.
    `switch_s`: longest time from armed to switched; it includes a training step.
    `start_s`: how long a worker that has not opened a session is assumed to be still starting.
    `lost_s`: how long it may take until a lost node is noticed by its lease.
    `fence_s`: how long after its lease a node that is cut off may take to stop its workers; see `reconfig.fencing`.
    `blame_s`: how long to wait, after a worker lost a peer, for that peer's own error.
    `below_min_s`: how long the job waits with fewer than `min_nodes`.
    `replaces_raised`: a worker that raises an error of its own is lost like one that was killed, within the restart
    budget. `max_per_window`: a slot or node that fails so many times within `window_s` is cordoned; 0: never.
    `retry_s`: wait before a change is tried again that failed for a reason that may pass; see `sizes.given_up`.
    """

    min_nodes: int
    max_nodes: int
    num_slots: int
    initial: ParallelConfig | None = None
    allowed: tuple[ParallelConfig, ...] | None = None
    refuse: Callable[[ParallelConfig], str | None] = lambda _: None
    max_restarts: int = 0
    alike_failures: int = 3
    redundancy: Redundancy = field(default_factory=Redundancy)
    replaces_raised: bool = False
    max_per_window: int = 0
    window_s: float = 600.0
    pack: bool | None = None
    settle_s: float = 1.0
    prepare_s: float = 300.0
    switch_s: float = 1800.0
    start_s: float = 120.0
    lost_s: float = 12.0
    fence_s: float = 2.0
    blame_s: float = 3.0
    below_min_s: float = 600.0
    retry_s: float = 10.0


@dataclass(frozen=True, slots=True)
class View:
    """Everything that the leader knows at one moment.

    `nodes`: the live ones. `descriptions`: config -> layout of the job's model under it, or one line on why the model
    refuses it. `quiet_s`: since the set of nodes or their states last changed. `phase_s`: since `current` last changed.
    `failed_s`: since the first failure of a worker in this generation. `connected_s`: since the leader has followed
    etcd without interruption: before one lease time, an absent node may still renew its lease. `absent_s`: node ->
    since it was seen to be gone, for nodes that were ever present. `refused_s`: since the first worker refused, or
    ended in, the proposed generation. `undescribed`: configs whose layout no worker could tell just now, for a reason
    of its own. `alive_s`: node that is gone from etcd -> since its agent last said, asked directly, that it still has
    workers. `cleared`: node -> that field of its record, for every node that was ever present. `testified`: nodes that
    are gone and whose workers have ended according to their `Testimony`.
    `stop`: an administrator's order to end the job, if there is one.
    `cordons`: nodes and slots that take no workers. `time`: in seconds since 1970.
    """

    policy: Policy
    nodes: tuple[NodeRecord, ...]
    current: Current
    generations: Mapping[int, Generation] = field(default_factory=dict)
    acks: Mapping[tuple[int, str], Ack] = field(default_factory=dict)
    scale: Request | None = None
    drains: frozenset[str] = frozenset()
    paused: bool = False
    descriptions: Mapping[ParallelConfig, Layout | str] = field(default_factory=dict)
    quiet_s: float = 0.0
    phase_s: float = 0.0
    failed_s: float = 0.0
    connected_s: float = float("inf")
    absent_s: Mapping[str, float] = field(default_factory=dict)
    refused_s: float = 0.0
    undescribed: Mapping[ParallelConfig, str] = field(default_factory=dict)
    alive_s: Mapping[str, float] = field(default_factory=dict)
    cleared: Mapping[str, int] = field(default_factory=dict)
    stop: Order | None = None
    testified: frozenset[str] = frozenset()
    cordons: tuple[Cordon, ...] = ()
    time: float = 0.0

    @property
    def committed(self) -> Generation | None:
        return self.generations.get(self.current.committed)

    @property
    def live(self) -> frozenset[str]:
        return frozenset(node.name for node in self.nodes)

    def lost(self, nodes: Iterable[str]) -> list[str]:
        """Those of `nodes` that are certainly gone, and their workers with them."""
        gone = [node for node in nodes if node not in self.live]
        if self.connected_s < self.policy.lost_s:
            return [node for node in gone if node in self.testified]
        return [node for node in gone if self.fenced_in_s(node) <= 0]

    def fenced_in_s(self, node: str) -> float:
        """For how many seconds from now a node that is gone may still have workers."""
        if node in self.testified:
            return 0.0
        forever = float("inf")
        unseen_s, unheard_s = self.absent_s.get(node, forever), self.alive_s.get(node, forever)
        return max(self.policy.fence_s - unseen_s, self.policy.lost_s - unheard_s)

    @property
    def leaving(self) -> frozenset[str]:
        """Nodes that are told to leave: by signal or by an administrator."""
        draining = frozenset(node.name for node in self.nodes if node.state is NodeState.DRAINING)
        return draining | (self.drains & self.live)

    @property
    def usable(self) -> tuple[NodeRecord, ...]:
        """The nodes that may hold workers: members first, then in order of rank and arrival, at most `max_nodes`."""
        members = self.committed.nodes if self.committed else ()
        staying = [node for node in self.nodes if node.name not in self.leaving and self.admitted(node)]
        chosen = sorted(staying, key=lambda node: (node.name not in members, *_order(node)))[: self.policy.max_nodes]
        return tuple(sorted(chosen, key=_order))

    @property
    def num_usable_slots(self) -> int:
        return sum(len(self.admitted(node)) for node in self.usable)

    def open_slots(self, node: NodeRecord) -> tuple[int, ...]:
        """The slots of `node` that may take new workers."""
        every = (Slot(node.name, index) for index in range(node.num_slots))
        return tuple(slot.index for slot in every if not any(cordon.covers(slot) for cordon in self.cordons))

    def admitted(self, node: NodeRecord) -> tuple[int, ...]:
        """The slots of `node` that may have a worker: a worker stays where a cordon was put on its slot."""
        committed, loss = self.committed, self.current.loss
        if not self.cordons:
            return tuple(range(node.num_slots))
        gone = loss.slots if loss is not None else ()
        staying = [slot for slot in (committed.placement if committed else ()) if str(slot) not in gone]
        return tuple(sorted({*self.open_slots(node), *(slot.index for slot in staying if slot.node == node.name)}))

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots of live nodes that may have a worker, in the order of the topology."""
        return tuple(Slot(node.name, index) for node in sorted(self.nodes, key=_order) for index in self.admitted(node))

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """The slots of each node of the job at the largest number of nodes that nnodes admits.

        A node that has not joined yet is assumed to be as large as the largest present node, or as the leader's own.
        """
        here = tuple(node.num_slots for node in self.usable)
        largest = max(self.policy.num_slots, *(node.num_slots for node in self.nodes), 1)
        return here + (largest,) * (self.policy.max_nodes - len(here))

    @property
    def is_below_min(self) -> bool:
        """Whether fewer nodes can have workers than `nnodes` requires."""
        return len(self.usable) < self.policy.min_nodes

    @property
    def topology(self) -> Topology:
        """All live nodes, in stable order."""
        return Topology(tuple(Node(node.name, node.num_slots) for node in sorted(self.nodes, key=_order)))

    def ack(self, generation: int, node: str) -> Ack:
        return self.acks.get((generation, node)) or Ack(generation, node)


def uncleared(view: View) -> frozenset[str]:
    """The nodes that may still have workers from before the committed generation's fresh start. None of its workers may
    start before those have ended, or two generations could train at once."""
    committed = view.committed
    if committed is None or not committed.is_fresh or min(view.generations) == committed.id:
        return frozenset()
    slow = (node.name for node in view.nodes if node.cleared < committed.id)
    gone = (name for name in {*view.absent_s, *view.alive_s} if view.fenced_in_s(name) > 0)
    return frozenset(slow).union(name for name in gone if view.cleared.get(name, 0) < committed.id)


def store_of(node: NodeRecord) -> str:
    """``host:port`` of the store at which the next generation would meet if `node` hosted it."""
    return f"{node.address}:{node.store_port}"


def is_used(store: str, generations: Mapping[int, Generation]) -> bool:
    """Whether a fresh generation has met at `store`, so that no other may: ``env://`` leaves its keys there."""
    return any(generation.is_fresh and generation.store == store for generation in generations.values())


def _order(node: NodeRecord) -> tuple[int, int, str]:
    return (node.rank if node.rank is not None else 1 << 30, node.joined, node.name)


@dataclass(frozen=True, slots=True)
class Write:
    """One fenced transaction: the new `current` and what goes with it."""

    current: Current
    generation: Generation | None = None
    reply: Reply | None = None
    history: History | None = None
    cordons: tuple[Cordon, ...] = ()


@dataclass(frozen=True, slots=True)
class Describe:
    """Ask a worker for the layout of its model under `config`, then decide again."""

    config: ParallelConfig


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until something changes, or until `seconds` have passed. `why`: for people, where it matters."""

    seconds: float = float("inf")
    why: str = ""


@dataclass(frozen=True, slots=True)
class Foresee:
    """As `wait`, and ask workers for the layouts under `configs`, one after the other, when it costs nothing: none is
    needed now."""

    configs: tuple[ParallelConfig, ...]
    wait: Wait


Decision = Write | Describe | Foresee | Wait
