"""What a switch costs a real job beside the execution of its plan: for `bench_migration.py`.

Runs the demo's job on this host, has it change its size a few times, and reads the times that its workers recorded.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from run_demo import Administrator, median_step_ms, running

from etc_agent.parallel.config import ParallelConfig
from etc_agent.rendezvous.etcd.client import EtcdClient

_CHANGES = ("PP2TP2DP1", "PP1TP2DP2", "PP2TP1DP2", "PP1TP4DP1", "PP2TP2DP1", "PP1TP2DP2")
_TIMEOUT_S = 300.0
_STEPS_BETWEEN = 10


@dataclass(frozen=True, slots=True)
class JobCosts:
    """Medians over the changes to 4 workers, in milliseconds.

    `stop_overhead_ms`: training stood still, less the migration and the first step. `first_step_penalty_ms`: the first
    step of the new generation, less a usual one.
    """

    stop_overhead_ms: float
    first_step_penalty_ms: float
    changes: int


def measure_job(config: Path, out: Path) -> JobCosts:
    """Start the job of `config` under etc-run, change it `_CHANGES` times with etcdctl, stop it."""
    shown = Console(stderr=True)
    with running(config, out, shown) as job:
        endpoint, run_id = job.endpoint(_TIMEOUT_S)
        with EtcdClient([endpoint]) as client:
            administrator = Administrator(client, run_id, shown)
            job.train_until(_STEPS_BETWEEN, _TIMEOUT_S)
            for target in _CHANGES:
                record = administrator.change(job, target, _TIMEOUT_S)
                job.train_until(record.step + _STEPS_BETWEEN, _TIMEOUT_S)
            history = administrator.history()
            administrator.close()
    usual_ms = median_step_ms(job.steps())
    overheads, penalties = [], []
    for record in history:
        if record.stop_ms is None or record.generation not in usual_ms:
            continue
        if ParallelConfig.parse(record.config).num_ranks != 4:
            continue
        standing = sum(record.phases_ms.values())
        overheads.append(standing - record.phases_ms.get("migrate", 0.0))
        penalties.append(max(0.0, record.stop_ms - standing - usual_ms[record.generation]))
    return JobCosts(statistics.median(overheads), statistics.median(penalties), len(overheads))
