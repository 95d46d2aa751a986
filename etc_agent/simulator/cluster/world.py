"""A job's whole cluster on a virtual clock: etcd with leases, agents, workers, and a network that can fail in parts.

Agents run the real decisions (`reconfig.leader`, `reconfig.member`, `reconfig.fencing`) on records that they can read
only while they reach etcd. `World.run` lets time pass and checks at every moment that no two generations train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import permutations

from etc_agent.parallel.generation import Generation
from etc_agent.reconfig.fencing import Fencing, PeerStatus
from etc_agent.reconfig.known.records import Outcome
from etc_agent.reconfig.known.view import Decision, Policy, View
from etc_agent.reconfig.leader import decide
from etc_agent.reconfig.loss.replicas import unheld
from etc_agent.simulator.cluster.agent import Agent, FencingRule, rule
from etc_agent.simulator.cluster.etcd import Etcd
from etc_agent.simulator.cluster.workers import Model, Worker, layout_of

TICK_S = 0.25
ETCD = "etcd"
_SAID = ("nobody else holds", "no worker has survived")
"""What the leader says when it restarts all workers for want of a part of the state."""


class TrainedAtOnce(AssertionError):
    """Two generations trained at the same moment."""


class NeedlessRestart(AssertionError):
    """All workers were restarted although the survivors of a loss held the whole state."""


@dataclass
class World:
    """`cut`: pairs (from, to) of nodes, or of a node and `ETCD`, where the first cannot open a connection to the
    second. `trained`: generation -> the first and the last moment at which it trained. `broken`: generations
    of which a connection was cut for good. `torn_after`: so many workers see the vote of a change succeed, the others
    nothing; None: all do. `fencing_rule` and `decide` are the real ones unless a test replaces them by a wrong one, to
    see that this is noticed."""

    policy: Policy
    fencing: Fencing
    model: Model = field(default_factory=Model)
    fencing_rule: FencingRule = field(default=rule)
    decide: Callable[[View], Decision] = field(default=decide)
    now: float = 0.0
    agents: dict[str, Agent] = field(default_factory=dict)
    cut: set[tuple[str, str]] = field(default_factory=set)
    trained: dict[int, tuple[float, float]] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)
    torn_after: int | None = None
    etcd: Etcd = field(init=False)
    _num_lives: int = 0
    _checked: int = 0

    def __post_init__(self) -> None:
        self.etcd = Etcd(self.fencing.ttl_s)

    # ---- what happens to a cluster ----------------------------------------------------------------------------

    def join(self, name: str, num_slots: int = 2) -> None:
        """A new agent; it knows nothing about an earlier one of that name."""
        self._num_lives += 1000
        agent = Agent(name, num_slots, self, self._num_lives, lost_up_to=self.etcd.records.current.next_id - 1)
        self.agents[name] = agent

    def die(self, name: str) -> None:
        """The host fails, with everything on it."""
        del self.agents[name]

    def split(self, one: str, other: str) -> None:
        """Cut both directions between two nodes, or a node and `ETCD`."""
        self.cut |= {(one, other), (other, one)}

    def heal(self) -> None:
        """Repair the network."""
        self.cut.clear()

    # ---- the network ------------------------------------------------------------------------------------------

    def reaches_etcd(self, name: str) -> bool:
        return self.etcd.is_up and (name, ETCD) not in self.cut

    def ask(self, name: str, other: str, status: PeerStatus) -> PeerStatus | None:
        agent = self.agents.get(other)
        if agent is None or agent.is_frozen or agent.has_left or (name, other) in self.cut:
            return None
        agent.statuses[name] = status
        return agent.status

    def _are_linked(self, nodes: tuple[str, ...]) -> bool:
        """Whether the workers on all of `nodes` can reach each other."""
        return not self.cut or not any(pair in self.cut for pair in permutations(nodes, 2))

    # ---- time passes ------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            TrainedAtOnce: two generations train at the same moment.
            NeedlessRestart: all workers were restarted for want of a part of the state that a living worker holds.
        """
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S
            self._tick()

    def run_until(self, condition: Callable[[], bool], what: str, limit_s: float = 600.0) -> None:
        """Let time pass until `condition` holds."""
        end = self.now + limit_s
        while not condition():
            assert self.now < end, f"waited {limit_s:g} s in vain for {what}: {self.etcd.records.current}"
            self.run(TICK_S)

    def _tick(self) -> None:
        if self.etcd.is_up:
            self.etcd.expire(self.now)
        for agent in list(self.agents.values()):
            agent.guard()
            if not agent.is_frozen:
                agent.step()
            for worker in agent.workers.values():
                if worker.is_running and self.now >= worker.ends_at:
                    worker.end(0 if worker.view.switched else 143)
            if agent.is_done and not agent.is_frozen:
                agent.leave()
                del self.agents[agent.name]
        self._train()
        self._check_restarts()

    def _check_restarts(self) -> None:
        generations, committed = self.etcd.records.generations, self.etcd.records.current.committed
        if committed == self._checked or not generations[committed].is_fresh:
            self._checked = committed
            return
        before, self._checked = generations.get(self._checked), committed
        why = generations[committed].reason
        if before is None or not self.model.in_session or not any(said in why for said in _SAID):
            return
        lost = [
            rank for rank, slot in enumerate(before.placement) if not self._worker(before, slot.node, slot.index)
        ]
        known = {node.name for node in self.etcd.records.nodes}
        if unheld(layout_of(before.config), lost) is None and known >= set(before.nodes):
            raise NeedlessRestart(f"{self.now:g} s: {why}, and only {lost} of generation {before.id} are gone")

    def _worker(self, generation: Generation, node: str, index: int) -> Worker | None:
        """The living worker of `generation` in that slot."""
        agent = self.agents.get(node)
        worker = agent.workers.get(index) if agent else None
        return worker if worker and worker.is_running and worker.generation == generation.id else None

    def _train(self) -> None:
        """Workers that can reach all others of their generation complete a step, and switch if all are armed."""
        alive = {w.generation for a in self.agents.values() for w in a.workers.values() if w.is_running}
        training = []
        for generation_id in sorted(alive - {0}):
            generation = self.etcd.records.generations[generation_id]
            workers = [self._worker(generation, slot.node, slot.index) for slot in generation.placement]
            whole = [worker for worker in workers if worker and not worker.is_latched and not worker.completed]
            if len(whole) < len(workers) or generation_id in self.broken:
                self._notice(generation)
                continue
            if not self._are_linked(generation.nodes):
                continue
            if not generation.is_held:
                training.append(generation_id)
                for node in generation.nodes:
                    self.agents[node].stepped_at = self.now
                for worker in whole:
                    worker.complete_step()
            proposed = self.etcd.records.generations.get(max(worker.armed for worker in whole))
            if proposed is not None and proposed.previous == generation.id and not proposed.lost:
                self._change(generation, proposed)
        self._recover()
        for generation_id in training:
            first, _ = self.trained.get(generation_id, (self.now, self.now))
            self.trained[generation_id] = (first, self.now)
        if len(training) > 1:
            raise TrainedAtOnce(f"generations {training} trained at once, {self.now:g} s after the start")

    def _notice(self, generation: Generation) -> None:
        """Workers notice that the process of a peer on a host that lives has ended, or that their groups are broken."""
        for slot in generation.placement:
            worker = self._worker(generation, slot.node, slot.index)
            gone = [
                other
                for other in generation.placement
                if other.node in self.agents and self._worker(generation, other.node, other.index) is None
            ]
            if worker is not None and (gone or generation.id in self.broken):
                worker.lose_peer()

    def _recover(self) -> None:
        """The change to the generation in which the survivors of a loss go on, when all are armed for it."""
        records = self.etcd.records
        proposed = records.generations.get(records.current.proposed)
        if proposed is not None and records.current.loss is not None and proposed.previous in records.generations:
            self._change(records.generations[proposed.previous], proposed)

    def _change(self, generation: Generation, proposed: Generation) -> None:
        """The vote of a change, if every worker that takes part in it is present and armed."""
        old = (slot for slot in generation.placement if slot not in proposed.lost)
        slots = tuple(dict.fromkeys((*old, *proposed.placement)))  # the old ones decide, and tell those that join
        taking_part = [(slot, self._taking_part(slot.node, slot.index, proposed.id)) for slot in slots]
        nodes = tuple(dict.fromkeys(slot.node for slot in slots))
        present = [(slot, worker) for slot, worker in taking_part if worker is not None]
        if len(present) < len(taking_part) or not self._are_linked(nodes):
            return
        if self.model.votes_down:
            for _, worker in present:
                worker.refuse(proposed.id, self.model.votes_down, self.model.kind)
            return
        step = max(worker.step for _, worker in present)
        for _, worker in present:
            worker.completed = proposed.id
        for slot, worker in present[: self.torn_after]:
            worker.enter(proposed.id, step)
            if slot not in proposed.placement:
                worker.end(0)

    def _taking_part(self, node: str, index: int, proposed: int) -> Worker | None:
        agent = self.agents.get(node)
        worker = agent.workers.get(index) if agent else None
        return worker if worker and worker.is_running and worker.armed == proposed else None

    # ---- what a test asks -------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self.etcd.records.current.outcome is not Outcome.RUNNING

    @property
    def committed(self) -> Generation:
        return self.etcd.records.generations[self.etcd.records.current.committed]

    def trains(self) -> bool:
        """Whether the committed generation has trained just now, on exactly the present workers."""
        _, last = self.trained.get(self.etcd.records.current.committed, (0.0, -1.0))
        wanted = {(slot.node, slot.index) for slot in self.committed.placement} if last >= 0 else set()
        return last == self.now and wanted == self.running()

    def running(self) -> set[tuple[str, int]]:
        """The slots in which a worker lives."""
        return {
            (name, index)
            for name, agent in self.agents.items()
            for index, worker in agent.workers.items()
            if worker.is_running
        }
