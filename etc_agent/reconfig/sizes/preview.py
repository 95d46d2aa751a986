"""A preview: what a request would do, by the leader's own decision and plan, without doing it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import node_numbers
from etc_agent.planner.errors import PlanError
from etc_agent.planner.transfers.effect import (
    buffer_bytes,
    by_worker,
    kept_bytes,
    num_transfers,
    received_bytes,
    traffic_of,
)
from etc_agent.planner.transfers.memory import peak_bytes
from etc_agent.planner.transfers.migration import make_plan
from etc_agent.reconfig.known.records import Request
from etc_agent.reconfig.known.view import Describe, Foresee, View, Wait, Write
from etc_agent.reconfig.leader import decide

MOST_WORKERS = 128
"""Up to this many workers of both generations the plan is written out; the leader does nothing else meanwhile."""
_NEWEST = 1 << 62
_MOST_SHOWN = 200
"""How many characters of a request are repeated in its answer."""


@dataclass(frozen=True, slots=True)
class NodePreview:
    """One node in a change: its ranks before and after, the bytes of the new state that its workers keep, those that
    they receive, from other nodes too, and the most state that one of them holds at once (in ``keep`` mode)."""

    node: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    kept_bytes: int
    received_bytes: int
    from_other_nodes_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class PlanPreview:
    """The plan of a change. `peak_bytes`, `release_peak_bytes`: the most state that one worker holds at once, in
    ``keep`` and in ``release`` mode; `buffer_bytes`: beside that, for one round's transfers."""

    config: str
    previous_config: str
    kept_bytes: int
    moved_bytes: int
    between_nodes_bytes: int
    transfers: int
    peak_bytes: int
    release_peak_bytes: int
    buffer_bytes: int
    nodes: tuple[NodePreview, ...]


@dataclass(frozen=True, slots=True)
class Preview:
    """``control/preview-reply``: the answer to the preview asked for at `revision`.

    `result`: what `control/reply` would say, "" where the leader would only wait. `is_restart`: whether all workers
    would be started afresh. `plan`: None where nothing would migrate, or where it is too large to be written out.
    """

    request: str
    revision: int
    result: str
    message: str
    config: str = ""
    is_restart: bool = False
    plan: PlanPreview | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        plan = value.get("plan")
        nodes = tuple(NodePreview(**node) for node in plan["nodes"]) if plan else ()
        return cls(**{**value, "plan": PlanPreview(**{**plan, "nodes": nodes}) if plan else None})


def preview(view: View, request: Request) -> Preview | Describe | None:
    """The answer to a preview; a question to a worker that comes first; or None while something else is to be written.

    The job is looked at as if it were not paused and its nodes had been unchanged for long.
    """
    nothing = Preview(request.text[:_MOST_SHOWN], request.revision, "", "")
    if view.current.proposed:
        waiting = f"generation {view.current.proposed} is being prepared; ask again when it is in force"
        return replace(nothing, message=waiting)
    asked = replace(view, scale=Request(request.text, _NEWEST), paused=False, quiet_s=float("inf"))
    try:
        decision = decide(asked)
        if isinstance(decision, Foresee):
            decision = decision.wait
        if isinstance(decision, Describe):
            return decision
        if isinstance(decision, Wait):
            return replace(nothing, message=decision.why or "the leader would do nothing now")
        return _of(decision, view, nothing)
    except PlanError as error:
        return replace(nothing, message=f"no plan can be made: {error}")


def _of(decision: Write, view: View, nothing: Preview) -> Preview | None:
    """What the leader would write, as a preview; None where that has nothing to do with the request."""
    reply, generation = decision.reply, decision.generation
    if reply is not None:
        when = "once the job is resumed (etc-ctl resume): " if view.paused else ""
        nothing = replace(nothing, result=str(reply.result), message=f"{when}{reply.message}")
    if generation is None:
        return nothing if reply is not None else None
    return replace(
        nothing, message=nothing.message or generation.reason, config=str(generation.config),
        is_restart=generation.is_fresh, plan=None if generation.is_fresh else plan_of(view, generation),
    )


def plan_of(view: View, generation: Generation) -> PlanPreview | None:
    """The plan of the change from the committed generation to `generation`; None where it is too large."""
    committed = view.committed
    assert committed is not None
    previous, current = view.descriptions.get(committed.config), view.descriptions.get(generation.config)
    if previous is None or current is None or isinstance(previous, str) or isinstance(current, str):
        return None
    slots, old, new = by_worker(previous, committed.placement, current, generation.placement)
    if len(slots) > MOST_WORKERS:
        return None
    topology = view.topology
    node_of = node_numbers(slots)
    plan = make_plan(old, new, nodes=node_of, forwarding=len(set(node_of)) > 1)
    peaks, released = peak_bytes(plan, old, new, "keep"), peak_bytes(plan, old, new, "release")
    kept, received = kept_bytes(plan), received_bytes(plan)
    traffic = traffic_of(plan, slots, topology)
    into = traffic.between.sum(axis=0) - traffic.between.diagonal()
    nodes = []
    for number, node in enumerate(topology.nodes):
        workers = [worker for worker, slot in enumerate(slots) if slot.node == node.name]
        if workers:
            nodes.append(NodePreview(
                node.name, _ranks(committed, node.name), _ranks(generation, node.name),
                sum(kept[worker] for worker in workers), sum(received[worker] for worker in workers),
                int(into[number]), max(peaks[worker] for worker in workers),
            ))
    return PlanPreview(
        str(generation.config), str(committed.config), sum(kept), plan.moved_bytes, int(into.sum()),
        num_transfers(plan), max(peaks), max(released), buffer_bytes(plan), tuple(nodes),
    )


def _ranks(generation: Generation, node: str) -> tuple[int, ...]:
    return tuple(rank for rank, slot in enumerate(generation.placement) if slot.node == node)
