"""A node's part of the present decisions: which workers to run, what to tell them, and what the node acknowledges.

Pure, like the leader's part: `owed` compares the records with the node's workers, and `summarise` combines the workers'
messages into the node's acknowledgement.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from etc_agent.control.causes import ErrorKind
from etc_agent.control.messages import (
    Armed,
    Committed,
    Freeze,
    Frozen,
    Message,
    Prepare,
    Withdrawn,
)
from etc_agent.parallel.generation import Generation
from etc_agent.reconfig.known.parts import base_of, committed_line, indices, participants, stayers
from etc_agent.reconfig.known.records import (
    Ack,
    Current,
    Failure,
    FailureKind,
    Outcome,
    Phase,
    Refusal,
    first_cause,
    first_refusal,
    slowest,
)
from etc_agent.reconfig.known.worker_view import WorkerView
from etc_agent.reconfig.loss.freezing import about_loss, lost_here


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
class Kill:
    """End the worker in slot `index` at once: it counts as lost."""

    index: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Send `message`, about `generation`, to the worker in slot `index`."""

    index: int
    generation: int
    message: Message


Action = Start | Stop | Expect | Kill | Tell


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
    lost = lost_here(node, current.loss)
    staying = indices(node, committed) - lost
    for index in staying:
        worker = workers.get(index)
        if worker is None or worker.started_for < base:
            if worker is not None and worker.is_running:
                actions.append(Stop(index))
            elif committed.is_fresh and committed.id > lost_up_to and not uncleared:
                actions.append(Start(index, committed, joining=False))
    may_join = proposed is not None and proposed.id > lost_up_to
    joining = indices(node, proposed) - stayers(node, proposed, generations) if proposed and may_join else frozenset()
    for index in joining:
        worker = workers.get(index)
        assert proposed is not None
        if worker is None or (worker.started_for < proposed.id and not worker.is_running):
            actions.append(Start(index, proposed, joining=True))
        elif worker.started_for < proposed.id and index not in lost:
            actions.append(Expect(index))
    for index, worker in workers.items():
        if worker.is_running and index in lost and worker.started_for <= committed.id:
            actions.append(Kill(index))
        elif worker.is_running and index not in staying | joining:
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
        message = about_loss(node, current.loss, committed, proposed, worker) if current.loss else None
        if message is not None:
            wanted.append(Tell(index, message.loss, message))
        if isinstance(message, Freeze):
            continue  # what follows depends on what all survivors answer
        if proposed is not None and index in participants(node, proposed, generations) - _left_before(
            node, proposed, generations, workers
        ):
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


def _left_before(
    node: str, proposed: Generation, generations: Mapping[int, Generation], workers: Mapping[int, WorkerView]
) -> frozenset[int]:
    """The slots that join where the worker that left in an earlier change is still ending: the one to be told is
    started after it."""
    joining = indices(node, proposed) - stayers(node, proposed, generations)
    return frozenset(index for index in joining if index in workers and workers[index].started_for < proposed.id)


def summarise(
    node: str,
    generation: Generation,
    generations: Mapping[int, Generation],
    workers: Mapping[int, WorkerView],
    lost_up_to: int = 0,
    frozen: Frozen | None = None,
) -> Ack:
    """This node's acknowledgement of `generation`. `lost_up_to`: as in `owed`. `frozen`: of `frozen_here`."""
    base = base_of(generation, generations)
    slots = indices(node, generation)
    new = slots - stayers(node, generation, generations)
    own = {
        index: worker
        for index, worker in workers.items()
        if worker.started_for >= (generation.id if index in new else base)
    }
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
    failures = {worker.index: worker.failure for worker in (*holding, *members) if worker.failure}
    failures |= _ended_early(node, generation, [own[index] for index in sorted(new) if index in own])
    waiting = [
        Refusal(f"{node}/{worker.index}", message.kind, message.error)
        for worker in members
        if worker.is_running and (message := worker.peer_lost.get(generation.id))
    ]
    ended = [worker for worker in holding if _finished(worker, generation.id)]
    finished = complete and len(ended) == len(holding)
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
        ended=next((f"{node}/{worker.index}" for worker in ended if worker.has_closed or not worker.in_session), ""),
        left=tuple(f"{node}/{worker.index}" for worker in ended if worker.in_session and not worker.has_closed),
        failure=first_cause(failures.values()),
        failed=tuple(failures[index] for index in sorted(failures)),
        peer_lost=first_refusal(waiting),
        frozen=frozen,
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


def _ended_early(node: str, generation: Generation, joining: Iterable[WorkerView]) -> dict[int, Failure]:
    """The failures of workers that have exited with code 0 before they had joined `generation`."""
    if generation.is_fresh:
        return {}
    why = "it ended with exit code 0 before it had joined"
    return {
        worker.index: Failure(f"{node}/{worker.index}", FailureKind.SILENT, 1, why)
        for worker in joining
        if worker.exit_code == 0 and generation.id not in worker.switched
    }


def _finished(worker: WorkerView, generation: int) -> bool:
    """Whether it exited with code 0 in `generation`, rather than leaving it for a later one."""
    is_of_it = worker.started_for <= generation and not any(later > generation for later in worker.switched)
    return worker.exit_code == 0 and is_of_it
