"""The metrics of one agent, worked out from the job's records and from what this node knows of itself.

Facts of the job have the label ``run_id`` alone. Every agent exports the same numbers of them, from the same records,
so any one can be scraped and a change of leader changes nothing; where several are, take the max. Facts of a node have
the label ``node`` too, and can be summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from etc_agent.agent.telemetry.facts import NodeFacts, WorkerState
from etc_agent.parallel.generation import Trigger
from etc_agent.reconfig.known.observing import JobRecords
from etc_agent.reconfig.known.records import Outcome
from etc_agent.reconfig.past.account import Account, Distribution

OUTCOMES = ("committed", "withdrawn")


class Kind(StrEnum):
    """Prometheus's types of metrics."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Sample:
    """One value and its labels; a `Distribution` in a histogram."""

    labels: Mapping[str, str]
    value: float | Distribution


@dataclass(frozen=True, slots=True)
class Family:
    """All samples of one metric. `name`: without ``_total``, which Prometheus adds to counters."""

    name: str
    kind: Kind
    help: str
    samples: tuple[Sample, ...]


class JobPhase(StrEnum):
    """What the job does. `WAITING`: there is no generation yet. `STEADY`: one is committed and none proposed."""

    WAITING = "waiting"
    STEADY = "steady"
    PROPOSED = "proposed"
    ARMED = "armed"
    HELD = "held"
    LOSS = "loss"
    ENDED = "ended"


def phase_of(records: JobRecords) -> JobPhase:
    """What the job does according to its records."""
    current = records.current
    committed = records.generations.get(current.committed)
    if current.outcome is not Outcome.RUNNING:
        return JobPhase.ENDED
    if committed is None:
        return JobPhase.WAITING
    if current.loss is not None:
        return JobPhase.LOSS
    if current.proposed:
        return JobPhase(current.phase)
    return JobPhase.HELD if committed.is_held else JobPhase.STEADY


def not_ready(records: JobRecords, facts: NodeFacts) -> str:
    """Why this node takes no part in the job at the moment, in one line; "" where it does."""
    if not facts.is_registered:
        return "this node is not registered in etcd"
    if facts.is_leaving:
        return "this node was told to leave"
    phase = phase_of(records)
    if phase in (JobPhase.WAITING, JobPhase.HELD, JobPhase.ENDED):
        return f"the job is {phase}"
    if starting := facts.num_workers.get(WorkerState.STARTING):
        return f"{starting} workers are starting"
    return ""


def families(records: JobRecords, facts: NodeFacts) -> tuple[Family, ...]:
    """Every metric of this agent."""
    return (*_of_job(records, facts), *_of_node(facts), *_of_account(records.account_now, facts.run_id))


def _of_job(records: JobRecords, facts: NodeFacts) -> tuple[Family, ...]:
    current, phase = records.current, phase_of(records)
    committed = records.generations.get(current.committed)
    config = committed.config if committed else None
    degrees = {"pp": config.pp, "tp": config.tp, "dp": config.dp} if config else {}
    job = {"run_id": facts.run_id}
    info = {**job, "version": facts.version, "config": str(config) if config else ""}
    left = max(0, facts.max_restarts - current.restarts)
    found = [
        _gauge("info", "The release, and the parallel config of the committed generation.", Sample(info, 1)),
        _gauge("generation", "Number of the committed generation; 0 before the first.", Sample(job, current.committed)),
        _gauge("paused", "1 while control/pause is set.", Sample(job, records.paused)),
        _gauge(
            "phase", "1 for what the job does now.",
            *(Sample({**job, "phase": each}, each is phase) for each in JobPhase),
        ),
        _gauge(
            "parallel_degree", "Degree of each axis of the committed generation's config.",
            *(Sample({**job, "axis": axis}, degree) for axis, degree in degrees.items()),
        ),
        _gauge("request_pending", "1 while an accepted request for another size is not met.",
               Sample(job, current.pending_scale > 0)),
        _gauge("nodes", "Nodes that are registered in etcd.", Sample(job, len(records.nodes))),
        _gauge("restart_budget_remaining", "Restarts after failures that are left.", Sample(job, left)),
    ]
    if (goodput := records.goodput) is not None:
        found += [
            _counter(
                "trained_seconds", "Seconds of steps that were completed for the first time.",
                Sample(job, goodput.trained_s),
            ),
            _counter("life_seconds", "Seconds since the job began.", Sample(job, goodput.life_s(facts.now))),
            _counter(
                "steps_redone", "Completed steps that the job went back over after a loss.", Sample(job, goodput.redone)
            ),
        ]
    return tuple(found)


def _of_node(facts: NodeFacts) -> tuple[Family, ...]:
    node = {"run_id": facts.run_id, "node": facts.node}
    present = [state for state in WorkerState if state is not WorkerState.ENDED]
    states = {**{str(state): facts.num_workers.get(state, 0) for state in present}, "spare": facts.num_spares}
    found = [
        _gauge("is_leader", "1 on the node that leads the job.", Sample(node, facts.is_leader)),
        _gauge(
            "workers", "Processes on this node by state; spare: warm spares.",
            *(Sample({**node, "state": state}, count) for state, count in states.items()),
        ),
        _gauge("lease_held", "1 while this node's record is certainly in etcd.", Sample(node, facts.is_registered)),
        _gauge(
            "etcd_last_seen_timestamp_seconds", "When etcd was last heard from.", Sample(node, facts.etcd_seen_at)
        ),
    ]
    if facts.step is not None:
        rate = 1 / facts.step_s if facts.step_s > 0 else 0.0
        found += [
            _gauge("step", "The next step of this node's furthest worker.", Sample(node, facts.step)),
            _gauge("steps_per_second", "From the mean duration of the latest steps.", Sample(node, rate)),
        ]
    return tuple(found)


def _of_account(account: Account, run_id: str) -> tuple[Family, ...]:
    job = {"run_id": run_id}
    restarting = [trigger for trigger in Trigger if trigger is not Trigger.START]
    return (
        _counter(
            "reconfigurations", "Generations by outcome, and by what they were made for.",
            *(
                Sample({**job, "outcome": outcome, "reason": trigger}, account.changes.get((outcome, trigger), 0))
                for outcome in OUTCOMES for trigger in Trigger
            ),
        ),
        _counter(
            "restarts", "Times that all workers were started afresh, by what made it necessary.",
            *(Sample({**job, "reason": trigger}, account.restarts.get(trigger, 0)) for trigger in restarting),
        ),
        _counter(
            "failures_handled", "Losses that the job has gone on from, in place or by a restart.",
            *(
                Sample({**job, "kind": trigger}, account.losses.get(trigger, 0))
                for trigger in Trigger if trigger.is_loss
            ),
        ),
        _counter(
            "hangs", "Losses that were workers which hung.", Sample(job, account.losses.get(Trigger.WORKER_HUNG, 0))
        ),
        _counter("moved_bytes", "Bytes of state that workers have received in changes.",
                 Sample(job, account.moved_bytes)),
        _histogram("stop_seconds", "From the last step before a planned change to the end of the first one after it.",
                   Sample(job, account.stops)),
        _histogram("recovery_seconds", "The same where a loss was handled in place.", Sample(job, account.recoveries)),
        _histogram(
            "phase_seconds", "Phases of changes, of the slowest worker; those beside training begin with prepare_.",
            *(Sample({**job, "phase": name}, durations) for name, durations in sorted(account.phases.items())),
        ),
    )


def _gauge(name: str, text: str, *samples: Sample) -> Family:
    return Family(f"etc_run_{name}", Kind.GAUGE, text, samples)


def _counter(name: str, text: str, *samples: Sample) -> Family:
    return Family(f"etc_run_{name}", Kind.COUNTER, text, samples)


def _histogram(name: str, text: str, *samples: Sample) -> Family:
    return Family(f"etc_run_{name}", Kind.HISTOGRAM, text, samples)
