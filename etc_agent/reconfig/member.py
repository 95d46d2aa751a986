"""A node's part of the present decisions: which workers to run, what to tell them, and what the node acknowledges.

Pure, like the leader's part: `owed` compares the records with the node's workers, and `summarise` combines the workers'
messages into the node's acknowledgement.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from etc_agent.control.causes import ErrorKind
from etc_agent.control.messages import (
    Armed,
    Committed,
    FirstStep,
    Message,
    Prepare,
    Prepared,
    Refused,
    Switched,
    Withdrawn,
)
from etc_agent.parallel.generation import Generation
from etc_agent.reconfig.records import (
    Ack,
    Current,
    Failure,
    Outcome,
    Phase,
    Refusal,
    first_cause,
    first_refusal,
    slowest,
)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker process of this node, in slot `index`, started for generation `started_for`.

    `exit_code`: None while it runs. `in_session`: it has sent Hello. `began_at`: the first step of the generation that
    it was started for. `told`: messages already sent to it, by type and generation. `is_plain`: it runs no session and
    never will. `has_stepped`: it has completed a training step. The messages of the worker itself are by generation.
    """

    index: int
    started_for: int
    in_session: bool = False
    began_at: int = 0
    is_plain: bool = False
    has_stepped: bool = False
    exit_code: int | None = None
    failure: Failure | None = None
    told: frozenset[tuple[str, int]] = frozenset()
    prepared: Mapping[int, Prepared] = field(default_factory=dict)
    refused: Mapping[int, Refused] = field(default_factory=dict)
    switched: Mapping[int, Switched] = field(default_factory=dict)
    first_step: Mapping[int, FirstStep] = field(default_factory=dict)

    @property
    def is_running(self) -> bool:
        return self.exit_code is None


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker in slot `index` for `generation`; one that joins waits for a Prepare message."""

    index: int
    generation: Generation
    joining: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """End the worker in slot `index` with a signal."""

    index: int


@dataclass(frozen=True, slots=True)
class Expect:
    """The worker in slot `index` is about to exit by itself; end it if it takes longer than the grace period."""

    index: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Send `message`, about `generation`, to the worker in slot `index`."""

    index: int
    generation: int
    message: Message


Action = Start | Stop | Expect | Tell


def owed(
    node: str,
    current: Current,
    generations: Mapping[int, Generation],
    workers: Mapping[int, WorkerView],
    lost_up_to: int = 0,
    uncleared: Collection[str] = (),
) -> list[Action]:
    """Everything that this node still has to do. `lost_up_to`: in generations up to this one the node's workers are
    lost, and none is started. `uncleared`: the nodes that have to stop workers before any worker of a fresh generation
    starts (`view.uncleared`)."""
    if current.outcome is not Outcome.RUNNING:
        return [Stop(worker.index) for worker in workers.values() if worker.is_running]
    committed, proposed = generations.get(current.committed), generations.get(current.proposed)
    if committed is None:
        return []
    actions: list[Action] = []
    base = base_of(committed, generations)
    staying = indices(node, committed)
    for index in staying:
        worker = workers.get(index)
        if worker is None or worker.started_for < base:
            if worker is not None and worker.is_running:
                actions.append(Stop(index))
            elif committed.is_fresh and committed.id > lost_up_to and not uncleared:
                actions.append(Start(index, committed, joining=False))
    joining = indices(node, proposed) - staying if proposed and proposed.id > lost_up_to else frozenset()
    for index in joining:
        worker = workers.get(index)
        assert proposed is not None
        if worker is None or (worker.started_for < proposed.id and not worker.is_running):
            actions.append(Start(index, proposed, joining=True))
        elif worker.started_for < proposed.id:
            actions.append(Expect(index))
    for index, worker in workers.items():
        if worker.is_running and index not in staying | joining:
            actions.append(Expect(index) if worker.in_session and worker.started_for >= base else Stop(index))
    return actions + _messages(node, current, committed, proposed, generations, workers)


def cleared(current: Current, generations: Mapping[int, Generation], workers: Mapping[int, WorkerView]) -> int:
    """The value of `NodeRecord.cleared`: no worker runs on this node that was started for an earlier generation."""
    committed = generations.get(current.committed)
    if committed is None:
        return 0
    running = (worker.started_for for worker in workers.values() if worker.is_running)
    return min([base_of(committed, generations), *running])


def _messages(
    node: str,
    current: Current,
    committed: Generation,
    proposed: Generation | None,
    generations: Mapping[int, Generation],
    workers: Mapping[int, WorkerView],
) -> list[Action]:
    wanted: list[Action] = []
    line = committed_line(committed, generations)
    base = base_of(committed, generations)
    for index, worker in workers.items():
        if not worker.in_session or not worker.is_running or worker.started_for < base:
            continue
        if proposed is not None and index in participants(node, proposed, generations):
            previous = generations[proposed.previous]
            wanted.append(Tell(index, proposed.id, Prepare(node, proposed.to_json(), previous.to_json())))
            if current.phase is Phase.ARMED:
                wanted.append(Tell(index, proposed.id, Armed(proposed.id)))
        prepared_for = [generation for kind, generation in worker.told if kind == Prepare.type]
        for generation in prepared_for:
            if generation == current.proposed or generation not in generations:  # the latter was told long ago
                continue
            if generation in line:
                wanted.append(Tell(index, generation, Committed(generation)))
            else:
                wanted.append(Tell(index, generation, Withdrawn(generation, "withdrawn by the leader")))
    return [
        action
        for action in wanted
        if isinstance(action, Tell) and (action.message.type, action.generation) not in workers[action.index].told
    ]


def summarise(
    node: str,
    generation: Generation,
    generations: Mapping[int, Generation],
    workers: Mapping[int, WorkerView],
    lost_up_to: int = 0,
) -> Ack:
    """This node's acknowledgement of `generation`. `lost_up_to`: as in `owed`."""
    base = base_of(generation, generations)
    slots = indices(node, generation)
    own = {index: worker for index, worker in workers.items() if worker.started_for >= base}
    holding = [own[index] for index in slots if index in own]
    complete = bool(slots) and len(holding) == len(slots)
    taking_part = participants(node, generation, generations)
    members = [own[index] for index in sorted(taking_part) if index in own]
    whole = len(members) == len(taking_part)
    prepared = [worker.prepared.get(generation.id) for worker in members]
    digests = {message.digest for message in prepared if message}
    refusals = [
        Refusal(f"{node}/{worker.index}", worker.refused[generation.id].kind, worker.refused[generation.id].error)
        for worker in members
        if generation.id in worker.refused
    ]
    switched = [worker.switched[generation.id] for worker in members if generation.id in worker.switched]
    first = [worker.first_step[generation.id] for worker in holding if generation.id in worker.first_step]
    ready = whole and all(prepared) and not generation.is_fresh
    if ready and len(digests) > 1:
        different = "two workers of one node computed different migration plans"
        refusals = [Refusal(f"{node}/{members[0].index}", ErrorKind.RAISED, different)]
    failures = [worker.failure for worker in (*holding, *members) if worker.failure]
    finished = complete and all(_finished(worker, generation.id) for worker in holding)
    return Ack(
        generation.id,
        node,
        in_session=complete and all(worker.in_session for worker in holding),
        is_plain=any(worker.is_plain for worker in holding),
        prepared=(next(iter(digests)) if digests else "none") if ready and len(digests) <= 1 else "",
        refusal=first_refusal(refusals),
        switched=whole and len(switched) == len(members) and not generation.is_fresh,
        has_stepped=any(worker.has_stepped for worker in holding),
        finished=finished,
        lost=bool(slots) and generation.id <= lost_up_to and not finished,
        ended=next((f"{node}/{worker.index}" for worker in holding if _finished(worker, generation.id)), ""),
        failure=first_cause(failures),
        step=max(
            (worker.began_at for worker in holding) if generation.is_fresh else (message.step for message in switched),
            default=0,
        ),
        sent_bytes=sum(message.sent_bytes for message in switched),
        received_bytes=sum(message.received_bytes for message in switched),
        referred_bytes=sum(message.referred_bytes for message in switched),
        stop_ms=max((step.stop_ms for step in first), default=0.0) if slots and len(first) == len(slots) else None,
        phases_ms=slowest(message.phases_ms for message in switched),
        prepare_ms=slowest(message.phases_ms for message in prepared if message),
    )


def _finished(worker: WorkerView, generation: int) -> bool:
    """Whether it exited with code 0 in `generation`, rather than leaving it for a later one."""
    return worker.exit_code == 0 and not any(later > generation for later in worker.switched)


def indices(node: str, generation: Generation) -> frozenset[int]:
    """The slots of `node` that have a worker in `generation`."""
    return frozenset(slot.index for slot in generation.placement if slot.node == node)


def idle(node: str, num_slots: int, current: Current, generations: Mapping[int, Generation]) -> frozenset[int]:
    """The slots of `node` that neither the committed nor the proposed generation uses; none before the first."""
    if not current.committed:
        return frozenset()
    used = [generations[g] for g in (current.committed, current.proposed) if g in generations]
    return frozenset(range(num_slots)).difference(*(indices(node, generation) for generation in used))


def participants(node: str, generation: Generation, generations: Mapping[int, Generation]) -> frozenset[int]:
    """The slots of `node` that take part in the change to `generation`: those that stay, leave and join."""
    previous = generations.get(generation.previous)
    return indices(node, generation) | (indices(node, previous) if previous else frozenset())


def base_of(generation: Generation, generations: Mapping[int, Generation]) -> int:
    """The fresh generation from which `generation` descends: workers started earlier belong to no present generation.

    A fresh generation is committed when it is written, so it is the newest before `generation`.
    """
    return max(other.id for other in generations.values() if other.is_fresh and other.id <= generation.id)


def committed_line(generation: Generation, generations: Mapping[int, Generation]) -> frozenset[int]:
    """`generation` and those before it, back to the fresh one or as far as there are records."""
    line = [generation.id]
    while not generation.is_fresh and generation.previous in generations:
        generation = generations[generation.previous]
        line.append(generation.id)
    return frozenset(line)
