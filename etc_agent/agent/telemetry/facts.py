"""What a node knows of itself, as plain values: the part of metrics and events that is not in the job's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class WorkerState(StrEnum):
    """What a worker's process does. `PLAIN`: it runs a script without a session, which reports no steps."""

    STARTING = "starting"
    TRAINING = "training"
    PLAIN = "plain"
    HUNG = "hung"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The last worker in slot `index` of this node. `generation`: the one it was started for. `exit_code`: None while
    it runs. `was_stopped`: the agent has ended it, or is about to."""

    index: int
    pid: int
    generation: int
    state: WorkerState
    exit_code: int | None = None
    was_stopped: bool = False


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """`max_restarts`: the job's restart budget. `etcd_seen_at`: when etcd was last heard from, in seconds since 1970;
    `now` likewise. `step`, `step_s`: the next step of its furthest worker, and the seconds that its last one took; None
    and 0 without workers that have stepped. `is_leaving`: it was told to leave. `is_registered`: its record is
    certainly in etcd. `num_spares`: warm spares.
    """

    run_id: str
    node: str
    version: str
    max_restarts: int
    now: float
    etcd_seen_at: float
    is_leader: bool = False
    is_registered: bool = False
    is_leaving: bool = False
    step: int | None = None
    step_s: float = 0.0
    workers: tuple[WorkerFacts, ...] = ()
    num_spares: int = 0

    @property
    def num_workers(self) -> Mapping[WorkerState, int]:
        """How many processes are in which state."""
        return Counter(worker.state for worker in self.workers)
