"""A node's part of a loss: which of its workers survive, what they are told, and what they have answered together."""

from __future__ import annotations

from collections.abc import Mapping

from etc_agent.control.messages import Agreed, Freeze, Frozen
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.parts import base_of, indices, on_node
from etc_agent.reconfig.known.records import Current, Loss
from etc_agent.reconfig.known.worker_view import WorkerView


def lost_here(node: str, loss: Loss | None) -> frozenset[int]:
    """The slots of `node` whose workers of the committed generation are lost."""
    return on_node(node, map(Slot.parse, loss.slots)) if loss is not None else frozenset()


def about_loss(
    node: str, loss: Loss, committed: Generation, proposed: Generation | None, worker: WorkerView
) -> Freeze | Agreed | None:
    """What `worker` has to hear about a loss that it survives: to freeze, then what all have agreed on."""
    agreement = loss.agreement
    is_agreed = agreement is not None and agreement.loss == loss.number
    joins = worker.started_for > committed.id
    if joins and is_agreed:
        return None  # started for the recovery, or has nothing that could be continued
    if loss.number not in worker.frozen:
        return Freeze(loss.number) if _survives(node, loss, committed, proposed, worker) else None
    if agreement is None or not is_agreed or joins:
        return None
    return Agreed(loss.number, agreement.generation, agreement.step, agreement.ok, agreement.from_copies)


def frozen_here(
    node: str, current: Current, generations: Mapping[int, Generation], workers: Mapping[int, WorkerView]
) -> Frozen | None:
    """What the workers of `node` that survive the present loss have answered, as one; None until all of them have, and
    where there are none. It is the answer of the worker that is furthest, but for three fields: `completed`, the
    generation that every worker is in or can still enter; `broken`, the first of any; `copied`, the step of the newest
    copy set that is complete on every worker of the committed generation."""
    loss, committed = current.loss, generations.get(current.committed)
    if loss is None or committed is None:
        return None
    proposed = generations.get(current.proposed)
    base = base_of(committed, generations)
    answers: list[Frozen] = []
    for worker in workers.values():
        if worker.started_for < base or not _survives(node, loss, committed, proposed, worker):
            continue
        answer = worker.frozen.get(loss.number) or _left(worker, loss.number, proposed)
        if answer is not None:
            answers.append(answer)
        elif worker.is_running:
            return None
    if not answers:
        return None
    furthest = max(answers, key=lambda answer: (answer.generation, answer.step))
    next_id = proposed.id if proposed else 0
    has_completed = all(next_id in (answer.generation, answer.completed) for answer in answers)
    return Frozen(
        loss.number, furthest.generation, furthest.step, furthest.ok,
        completed=next_id if has_completed else 0,
        broken=next((answer.broken for answer in answers if answer.broken), ""),
        copied=min((answer.copied for answer in answers if answer.generation == committed.id), default=-1),
    )


def _survives(
    node: str, loss: Loss, committed: Generation, proposed: Generation | None, worker: WorkerView
) -> bool:
    """Whether `worker` has a part in what has to be agreed on."""
    if worker.started_for > committed.id:
        return proposed is not None and worker.index in indices(node, proposed)
    return worker.index in indices(node, committed) - lost_here(node, loss)


def _left(worker: WorkerView, number: int, proposed: Generation | None) -> Frozen | None:
    """The answer of a worker that was to leave, and has: it has seen the vote of the change succeed."""
    if proposed is None or worker.is_running or proposed.id not in worker.switched:
        return None
    return Frozen(number, proposed.id, worker.switched[proposed.id].step)
