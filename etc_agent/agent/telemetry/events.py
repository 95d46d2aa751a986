"""What has happened, as events: the difference between two moments of the job's records and of one node.

Each node tells all of the job's events and those of its own workers. Of what changed twice while its agent did not
look, only the last is told; of generations all, since the history has them. docs/metrics.md describes every event's
fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from etc_agent.agent.telemetry.facts import NodeFacts, WorkerFacts
from etc_agent.reconfig.known.observing import JobRecords
from etc_agent.reconfig.known.records import NodeState, Outcome, Phase


class EventKind(StrEnum):
    """The field ``event`` of a line."""

    AGENT_STARTED = "agent_started"
    NODE_JOINED = "node_joined"
    NODE_LEAVES = "node_leaves"
    NODE_GONE = "node_gone"
    LEADER_CHANGED = "leader_changed"
    REQUESTED = "requested"
    ANSWERED = "answered"
    PAUSED = "paused"
    RESUMED = "resumed"
    CORDONED = "cordoned"
    UNCORDONED = "uncordoned"
    STOP_ORDERED = "stop_ordered"
    PROPOSED = "proposed"
    ARMED = "armed"
    COMMITTED = "committed"
    WITHDRAWN = "withdrawn"
    TRAINS_AGAIN = "trains_again"
    WORKERS_LOST = "workers_lost"
    WORKER_STARTED = "worker_started"
    WORKER_ENDED = "worker_ended"
    JOB_ENDED = "job_ended"
    AGENT_ENDED = "agent_ended"


@dataclass(frozen=True, slots=True)
class Event:
    """`fields`: JSON values, besides those that every line has."""

    kind: EventKind
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Moment:
    """What one agent sees at one time."""

    records: JobRecords
    facts: NodeFacts


def events_between(before: Moment, after: Moment) -> Iterator[Event]:
    """What has happened between two moments, in an order in which it may have."""
    yield from _of_nodes(before.records, after.records)
    yield from _of_control(before.records, after.records)
    yield from _of_generations(before.records, after.records)
    yield from _of_workers(before.facts, after.facts)
    current = after.records.current
    if current.outcome is not Outcome.RUNNING and before.records.current.outcome is Outcome.RUNNING:
        ended = {"outcome": current.outcome, "exit_code": current.exit_code, "why": current.why}
        yield Event(EventKind.JOB_ENDED, ended)


def _of_nodes(before: JobRecords, after: JobRecords) -> Iterator[Event]:
    were, are = ({node.name: node for node in records.nodes} for records in (before, after))
    for name, node in were.items():
        if name not in are or are[name].instance != node.instance:
            yield Event(EventKind.NODE_GONE, {"name": name})
    for name, node in are.items():
        is_new = name not in were or were[name].instance != node.instance
        if is_new:
            yield Event(EventKind.NODE_JOINED, {"name": name, "address": node.address, "slots": node.num_slots})
        was_leaving = not is_new and _is_leaving(were[name].state, name, before)
        if _is_leaving(node.state, name, after) and not was_leaving:
            yield Event(EventKind.NODE_LEAVES, {"name": name, "drained": name in after.drains})
    if after.leader != before.leader:
        yield Event(EventKind.LEADER_CHANGED, {"leader": after.leader})


def _is_leaving(state: NodeState, name: str, records: JobRecords) -> bool:
    return state is NodeState.DRAINING or name in records.drains


def _of_control(before: JobRecords, after: JobRecords) -> Iterator[Event]:
    if after.scale is not None and after.scale != before.scale:
        yield Event(EventKind.REQUESTED, {"request": after.scale.text, "revision": after.scale.revision})
    if after.reply is not None and after.reply != before.reply:
        yield Event(EventKind.ANSWERED, after.reply.to_json())
    if after.paused != before.paused:
        yield Event(EventKind.PAUSED if after.paused else EventKind.RESUMED, {})
    were, are = ({(cordon.node, cordon.index): cordon for cordon in records.cordons} for records in (before, after))
    for (node, index), cordon in are.items():
        if were.get((node, index)) != cordon:
            yield Event(EventKind.CORDONED, {"name": node, "slot": index, "why": str(cordon.order)})
    for node, index in were.keys() - are.keys():
        yield Event(EventKind.UNCORDONED, {"name": node, "slot": index})
    if after.stop is not None and before.stop is None:
        yield Event(EventKind.STOP_ORDERED, {"why": str(after.stop)})


def _of_generations(before: JobRecords, after: JobRecords) -> Iterator[Event]:
    was, current = before.current, after.current
    proposed = after.generations.get(current.proposed)
    if current.loss is not None and (was.loss is None or was.loss.number != current.loss.number):
        lost = current.loss
        yield Event(EventKind.WORKERS_LOST, {"loss": lost.number, "slots": list(lost.slots), "why": lost.why})
    if proposed is not None and proposed.id != was.proposed:
        named = {"generation": proposed.id, "config": str(proposed.config)}
        yield Event(EventKind.PROPOSED, {**named, "reason": proposed.reason, "trigger": proposed.trigger})
    was_armed = was.phase is Phase.ARMED and was.proposed == current.proposed
    if current.phase is Phase.ARMED and not was_armed:
        yield Event(EventKind.ARMED, {"generation": current.proposed})
    for id_, record in sorted(after.history.items()):
        known = before.history.get(id_)
        if known is None or known.outcome != record.outcome:
            kind = EventKind.COMMITTED if record.outcome == "committed" else EventKind.WITHDRAWN
            fields = asdict(record)
            written_at = fields.pop("time")
            yield Event(kind, {**fields, "written_at": written_at})
        if record.stop_ms is not None and (known is None or known.stop_ms is None):
            yield Event(EventKind.TRAINS_AGAIN, {"generation": id_, "step": record.step, "stop_ms": record.stop_ms})


def _of_workers(before: NodeFacts, after: NodeFacts) -> Iterator[Event]:
    were = {worker.pid: worker for worker in before.workers}
    for worker in after.workers:
        known = were.get(worker.pid)
        if known is None:
            yield Event(EventKind.WORKER_STARTED, _named(worker))
        if worker.exit_code is not None and (known is None or known.exit_code is None):
            ended = {"exit_code": worker.exit_code, "was_stopped": worker.was_stopped}
            yield Event(EventKind.WORKER_ENDED, {**_named(worker), **ended})


def _named(worker: WorkerFacts) -> dict[str, Any]:
    return {"slot": worker.index, "pid": worker.pid, "generation": worker.generation}
