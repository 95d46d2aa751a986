"""A job's control plane without time: every part acts at once, until no part has anything to do.

`Cluster` holds the records in dicts, applies the leader's decisions and does what `member.owed` asks of each node.
Workers answer at once or never, and a test sets the durations that the leader sees. `world.World` has a clock, leases
and a network instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from etc_agent.control.causes import ErrorKind
from etc_agent.control.messages import (
    Agreed,
    Armed,
    Committed,
    FirstStep,
    Freeze,
    Frozen,
    Message,
    Prepare,
    Prepared,
    Refused,
    Switched,
    Withdrawn,
)
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.reconfig import member
from etc_agent.reconfig.known import parts
from etc_agent.reconfig.known.records import (
    Ack,
    Current,
    Failure,
    FailureKind,
    History,
    NodeRecord,
    NodeState,
    Outcome,
    Reply,
    Request,
)
from etc_agent.reconfig.known.view import Describe, Foresee, Policy, View, Wait, Write, is_used, store_of, uncleared
from etc_agent.reconfig.known.worker_view import WorkerView
from etc_agent.reconfig.leader import decide
from etc_agent.reconfig.loss.freezing import frozen_here
from etc_agent.reconfig.sizes.controls import Cordon
from etc_agent.simulator.cluster.workers import layout_of
from etc_agent.state.layout import Layout


@dataclass
class Cluster:
    policy: Policy
    refuses: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    current: Current = field(default_factory=Current)
    generations: dict[int, Generation] = field(default_factory=dict)
    acks: dict[tuple[int, str], Ack] = field(default_factory=dict)
    workers: dict[str, dict[int, WorkerView]] = field(default_factory=dict)
    replies: list[Reply] = field(default_factory=list)
    history: dict[int, History] = field(default_factory=dict)
    descriptions: dict[ParallelConfig, Layout | str] = field(default_factory=dict)
    scale: Request | None = None
    paused: bool = False
    drains: frozenset[str] = frozenset()
    revision: int = 0
    is_quiet: bool = True
    phase_s: float = 0.0
    failed_s: float = 0.0
    num_started: int = 0
    writes: list[Write] = field(default_factory=list)
    hooked: bool = True
    is_slow: bool = False
    refusing: str = ""
    votes_down: str = ""
    is_switching: bool = False
    checkpoint: int = 0
    refused_s: float = 1e9
    undescribed: dict[ParallelConfig, str] = field(default_factory=dict)
    connected_s: float = 1e9
    absent_s: dict[str, float] = field(default_factory=dict)
    lost_up_to: dict[str, int] = field(default_factory=dict)
    cut: dict[str, tuple[NodeRecord, int]] = field(default_factory=dict)

    step: int = 7
    completed: int = 0
    is_deaf: bool = False
    broken: str = ""
    copied: int = -1
    has_first_step: bool = True
    cordons: tuple[Cordon, ...] = ()
    time: float = 0.0
    agreed: list[tuple[int, int, bool]] = field(default_factory=list)
    gone_back: list[int] = field(default_factory=list)

    # ---- what happens to a job --------------------------------------------------------------------------------

    def join(self, name: str, num_slots: int = 2) -> None:
        """A new agent; it knows nothing about an earlier one of that name."""
        self._register(name, num_slots)
        self.workers[name] = {}
        self.lost_up_to[name] = self.current.next_id - 1

    def _register(self, name: str, num_slots: int) -> None:
        self.revision += 1
        self.nodes[name] = NodeRecord(
            name, "127.0.0.1", num_slots, self.revision, f"{name}-{self.revision}", joined=self.revision
        )

    def lose(self, name: str) -> None:
        """The node's lease has expired, and its workers have ended."""
        del self.nodes[name], self.workers[name]

    def cut_off(self, name: str) -> None:
        """The node's lease has just expired, and its workers may still be running."""
        self.cut[name] = (self.nodes.pop(name), self.current.next_id - 1)
        self.absent_s[name] = 0.0

    def fence(self, name: str) -> None:
        """A node that is cut off stops its own workers."""
        self.lost_up_to[name] = self.cut[name][1]
        for index, worker in self.workers[name].items():
            if worker.is_running:
                self.workers[name][index] = replace(worker, exit_code=137)

    def come_back(self, name: str) -> None:
        """A node that was cut off is back."""
        del self.absent_s[name]
        self._register(name, self.cut.pop(name)[0].num_slots)

    def drain(self, name: str) -> None:
        self.nodes[name] = replace(self.nodes[name], state=NodeState.DRAINING)

    def ask(self, text: str) -> None:
        self.revision += 1
        self.scale = Request(text, self.revision)

    def fail(self, name: str, index: int, failure: Failure) -> None:
        worker = self.workers[name][index]
        exit_code = None if failure.kind.is_hang else failure.exit_code
        self.workers[name][index] = replace(worker, exit_code=exit_code, failure=failure)

    def stay(self, why: str) -> None:
        """The workers that are in a switch continue in the generation from which they come."""
        for workers in self.workers.values():
            for index, worker in workers.items():
                if worker.is_running and (Armed.type, self.current.proposed) in worker.told:
                    refusal = Refused(self.current.proposed, why, ErrorKind.PEER_LOST)
                    refused = {**worker.refused, self.current.proposed: refusal}
                    workers[index] = replace(worker, refused=refused)

    def progress(self, name: str) -> None:
        """The node's workers complete a step."""
        for index, worker in self.workers[name].items():
            self.workers[name][index] = replace(worker, has_stepped=True)

    def finish(self) -> None:
        for workers in self.workers.values():
            for index, worker in workers.items():
                workers[index] = replace(worker, exit_code=0, has_closed=True)

    # ---- time passes ------------------------------------------------------------------------------------------

    def view(self) -> View:
        quiet_s = 1e9 if self.is_quiet else 0.0
        return View(
            self.policy, tuple(self.nodes.values()), self.current, self.generations, self.acks, self.scale, self.drains,
            self.paused, self.descriptions, quiet_s, self.phase_s, self.failed_s, self.connected_s, self.absent_s,
            self.refused_s, self.undescribed, cordons=self.cordons, time=self.time,
        )

    def run(self, limit: int = 200) -> None:
        """Let leader and nodes act until none of them has anything to do."""
        for _ in range(limit):
            acted = any([self._act(name) for name in list(self.nodes)])
            if not self.lead() and not acted:
                return
        raise AssertionError(f"still busy after {limit} turns: {self.current}")

    def catch_up(self) -> None:
        """Workers that were slow are ready now, and those that were deaf hear."""
        for workers in self.workers.values():
            for index, worker in workers.items():
                if (Prepare.type, self.current.proposed) in worker.told:
                    ready = Prepared(self.current.proposed, "digest")
                    worker = replace(worker, prepared={**worker.prepared, self.current.proposed: ready})
                unheard = {number for kind, number in worker.told if kind == Freeze.type} - set(worker.frozen)
                for number in unheard:
                    worker = self._hear(worker, number, Freeze(number))
                if (Armed.type, self.current.proposed) in worker.told:
                    worker = self._hear(worker, self.current.proposed, Armed(self.current.proposed))
                workers[index] = worker

    def enter(self, name: str, index: int, generation: int) -> None:
        """The worker in that slot has seen the vote of the change to `generation` succeed, before any other."""
        worker = self.workers[name][index]
        switched = Switched(generation, self.step, {}, 1, 1, 1)
        self.workers[name][index] = replace(worker, switched={**worker.switched, generation: switched})

    def lead(self) -> bool:
        """Let the leader decide once; returns whether it had anything to do."""
        match decide(self.view()):
            case Wait():
                return False
            case Describe(config):
                assert config not in self.descriptions
                self.descriptions[config] = self.refuses.get(str(config)) or layout_of(config)
            case Foresee(configs):
                for config in configs:
                    self.descriptions[config] = self.refuses.get(str(config)) or layout_of(config)
            case Write() as write:
                self._apply(write)
        return True

    def _apply(self, write: Write) -> None:
        assert write.current != self.current or write.reply or write.history, "a write that changes nothing"
        self.writes.append(write)
        self.current = write.current
        if write.generation:
            assert write.generation.id not in self.generations, "a generation's number was used twice"
            self.generations[write.generation.id] = write.generation
        if write.reply:
            self.replies.append(write.reply)
        self.cordons += write.cordons
        if write.history:
            self.history[write.history.generation] = write.history

    def _act(self, name: str) -> bool:
        workers = self.workers[name]
        if renews := is_used(store_of(self.nodes[name]), self.generations):
            self.revision += 1
            self.nodes[name] = replace(self.nodes[name], store_port=self.revision)
        cleared = member.cleared(self.current, self.generations, workers)
        renews |= cleared != self.nodes[name].cleared
        self.nodes[name] = replace(self.nodes[name], cleared=cleared)
        awaited = uncleared(self.view())
        actions = member.owed(name, self.current, self.generations, workers, self.lost_up_to.get(name, 0), awaited)
        for action in actions:
            match action:
                case member.Start(index, generation, _):
                    self.num_started += 1
                    workers[index] = self._started(index, generation)
                case member.Stop(index) | member.Expect(index):
                    workers[index] = replace(workers[index], exit_code=0 if workers[index].switched else 143)
                case member.Kill(index):
                    killed = Failure(f"{name}/{index}", FailureKind.KILLED, 137, "killed")
                    workers[index] = replace(workers[index], exit_code=137, failure=killed)
                case member.Tell(index, generation_id, message):
                    workers[index] = self._hear(workers[index], generation_id, message)
        return self._acknowledge(name) or bool(actions) or renews

    def _started(self, index: int, generation: Generation) -> WorkerView:
        worker = WorkerView(index, generation.id, in_session=self.hooked, began_at=self.checkpoint)
        if not generation.is_fresh or str(generation.config) not in self.refuses:
            return worker
        why = self.refuses[str(generation.config)]
        return replace(worker, refused={generation.id: Refused(generation.id, why, ErrorKind.MODEL)})

    def _hear(self, worker: WorkerView, generation_id: int, message: Message) -> WorkerView:
        told = worker.told | {(message.type, generation_id)}
        worker = replace(worker, told=told)
        match message:
            case Prepare() if self.refusing:
                return replace(worker, refused={**worker.refused, generation_id: Refused(generation_id, self.refusing)})
            case Prepare() if not self.is_slow:
                return replace(worker, prepared={**worker.prepared, generation_id: Prepared(generation_id, "digest")})
            case Armed() if self.votes_down:
                refused = Refused(generation_id, self.votes_down)
                return replace(worker, refused={**worker.refused, generation_id: refused})
            case Armed() if self.is_switching:
                return worker
            case Armed():
                switched = Switched(generation_id, 10 * generation_id, {"migrate": 1.0}, 1, 1, 1)
                first = FirstStep(generation_id, 10 * generation_id, 5.0)
                return replace(
                    worker,
                    failure=None,
                    switched={**worker.switched, generation_id: switched},
                    first_step={**worker.first_step, generation_id: first} if self.has_first_step else {},
                )
            case Freeze(loss) if not self.is_deaf:
                generation = _in_force(worker, self.generations)
                frozen = Frozen(loss, generation, self.step, True, self.completed, self.broken, self.copied)
                return replace(worker, frozen={**worker.frozen, loss: frozen})
            case Agreed():
                self.agreed.append((message.generation, message.step, message.ok))
                self.gone_back += [message.step] if message.from_copies else []
                if worker.started_for == message.generation or message.generation in worker.switched:
                    return worker
                switched = Switched(message.generation, message.step, {}, 1, 1, 1)
                return replace(worker, switched={**worker.switched, message.generation: switched})
            case Prepare() | Committed() | Withdrawn() | Freeze():
                return worker
        raise AssertionError(message)

    def _acknowledge(self, name: str) -> bool:
        changed = False
        frozen = frozen_here(name, self.current, self.generations, self.workers[name])
        for generation_id in (self.current.committed, self.current.proposed):
            generation = self.generations.get(generation_id)
            if generation and parts.participants(name, generation, self.generations):
                lost_up_to = self.lost_up_to.get(name, 0)
                ack = member.summarise(name, generation, self.generations, self.workers[name], lost_up_to, frozen)
                changed |= self.acks.get((generation_id, name)) != ack
                self.acks[generation_id, name] = ack
        return changed

    # ---- what a test asks -------------------------------------------------------------------------------------

    @property
    def committed(self) -> Generation:
        return self.generations[self.current.committed]

    @property
    def config(self) -> str:
        return str(self.committed.config)

    def running(self) -> set[tuple[str, int]]:
        return {
            (name, index)
            for name, workers in self.workers.items()
            for index, worker in workers.items()
            if worker.is_running
        }

    def assert_consistent(self) -> None:
        """Exactly the committed generation's slots have a worker, once nothing is left to do."""
        if self.current.outcome is Outcome.RUNNING and self.current.committed:
            assert self.running() == {(slot.node, slot.index) for slot in self.committed.placement}


def _in_force(worker: WorkerView, generations: Mapping[int, Generation]) -> int:
    """The generation in which a worker trains; 0 for a joiner before its first."""
    started_for = generations[worker.started_for]
    return max((started_for.id if started_for.is_fresh else 0, *worker.switched))
