"""Takes down what a node knows of itself (`telemetry.facts`), from its workers and its connection to etcd."""

from __future__ import annotations

import time

from etc_agent.agent.etcd import Followed
from etc_agent.agent.processes.local_workers import LocalWorker, LocalWorkers
from etc_agent.agent.settings import JobSettings
from etc_agent.agent.telemetry.facts import NodeFacts, WorkerFacts, WorkerState
from etc_agent.version import version


def node_facts(
    settings: JobSettings,
    node: str,
    workers: LocalWorkers,
    followed: Followed,
    *,
    num_spares: int,
    is_leader: bool,
    is_leaving: bool,
) -> NodeFacts:
    """The facts at this moment; the arguments as in `NodeFacts`."""
    now, progress = time.time(), workers.progress()
    return NodeFacts(
        settings.run_id,
        node,
        version(),
        settings.max_restarts,
        now,
        etcd_seen_at=now - (time.monotonic() - followed.heard_at),
        is_leader=is_leader,
        is_registered=followed.membership.is_registered,
        is_leaving=is_leaving,
        step=progress.step if progress else None,
        step_s=progress.step_s if progress else 0.0,
        workers=tuple(map(_worker_facts, workers.all())),
        num_spares=num_spares,
    )


def _worker_facts(worker: LocalWorker) -> WorkerFacts:
    process = worker.process
    return WorkerFacts(
        worker.slot.index, process.pid, worker.started_for, _state_of(worker), process.exit_code, process.is_stopping
    )


def _state_of(worker: LocalWorker) -> WorkerState:
    if worker.process.exit_code is not None:
        return WorkerState.ENDED
    if worker.hang is not None:
        return WorkerState.HUNG
    if worker.progress is not None:
        return WorkerState.TRAINING
    return WorkerState.PLAIN if worker.is_plain or worker.heartbeats else WorkerState.STARTING
