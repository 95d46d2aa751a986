"""What the rest sees when a worker dies or hangs, with real processes."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from etc_agent.migration.errors import MigrationError
from etc_agent.migration.keep import KeepingMigration
from etc_agent.migration.memory.shared import SharedMemory
from etc_agent.migration.protocol import Migration
from etc_agent.migration.release import ReleasingMigration
from etc_agent.migration.report import MigrationReport, Span
from etc_agent.migration.trace import write_trace
from etc_agent.planner.transfers.migration import make_plan
from etc_agent.state.layout import Manifest
from tests.migration.processes import gloo, run_workers
from tests.migration.states import grid, logical, same_bits, slice_of, zeros

TIMEOUT_S = 3.0
VICTIM = 2


def rotation() -> tuple[list[Manifest], list[Manifest]]:
    """Every worker sends to the next and receives from the last, six tensors in six rounds."""
    tensors = [logical(f"w{index}", (3, 4096), torch.float32) for index in range(6)]
    old = [tuple(grid(t, (3, 1))[rank] for t in tensors) for rank in range(3)]
    new = [tuple(grid(t, (3, 1))[(rank + 1) % 3] for t in tensors) for rank in range(3)]
    return old, new


def with_fault(rank: int, size: int, store: dist.Store, fault: str, at: int, way: str) -> Any:
    """`at`: how many messages worker 2 completes before the fault; -1 is before its run. `way`: over gloo, by shared
    memory, or by landing areas in `release` mode."""
    old, new = rotation()
    plan = make_plan(old, new, round_bytes=4096 * 4)
    assert len(plan.rounds) == 6
    sources = {shard: slice_of(shard) for shard in old[rank]}
    group = gloo(store, "m", rank, size)
    migration: Migration
    if way == "landing":
        migration = ReleasingMigration(plan, rank, sources, group, timeout_s=TIMEOUT_S, budget_bytes=1 << 30)
    else:
        memory = SharedMemory(plan, rank) if way == "shared" else None
        targets = dict(memory.tensors) if memory else {shard: zeros(shard) for shard in new[rank]}
        migration = KeepingMigration(plan, rank, sources, targets, group, timeout_s=TIMEOUT_S, memory=memory)
    migration.prepare()
    finished = 0

    def strike() -> None:
        if rank == VICTIM:
            os._exit(1) if fault == "killed" else os.kill(os.getpid(), signal.SIGSTOP)

    def progress(done: int, total: int) -> None:
        nonlocal finished
        finished += 1
        if finished == at:
            strike()

    if at < 0:
        strike()
    start = time.monotonic()
    error = None
    try:
        migration.run(progress)
    except MigrationError as caught:
        error = str(caught)
    seconds = time.monotonic() - start
    held = migration.remaining() if isinstance(migration, ReleasingMigration) else sources
    intact = all(same_bits(tensor, slice_of(shard)) for shard, tensor in held.items())
    found = migration.targets
    arrived = all(shard in found and same_bits(found[shard], slice_of(shard)) for shard in new[rank])
    return error, seconds, intact, arrived


@pytest.mark.parametrize("way", ["gloo", "shared", "landing"])
@pytest.mark.parametrize("at", [-1, 1, 3, 12])
def test_a_killed_worker_is_named_at_once_and_what_the_rest_holds_is_right(at: int, way: str) -> None:
    outcomes = run_workers(with_fault, 3, "killed", at, way, limit_s=30)
    for outcome in outcomes[:VICTIM]:
        assert outcome.error is None, outcome.error
        error, seconds, intact, arrived = outcome.value
        assert intact
        assert seconds < TIMEOUT_S + 2
        assert (error is None) == arrived
        if error is not None:
            assert "from worker" in error or "to worker" in error or "at worker" in error
            assert "'w" in error
    if at < 12:
        assert any(outcome.value[0] is not None for outcome in outcomes[:VICTIM])


@pytest.mark.parametrize("way", ["gloo", "shared", "landing"])
def test_a_stopped_worker_costs_the_timeout_and_no_more(way: str) -> None:
    outcomes = run_workers(with_fault, 3, "stopped", -1, way, silent=[VICTIM])
    for outcome in outcomes[:VICTIM]:
        assert outcome.error is None, outcome.error
        error, seconds, intact, arrived = outcome.value
        assert intact
        assert seconds < TIMEOUT_S + 3
        assert (error is None) == arrived
        if error is not None:
            assert re.search(r"'w\d' \[.* worker [12] failed", error)
    # Worker 1 waits for what worker 2 holds, and worker 0 for worker 1 or for room at worker 2.
    assert "worker 2 failed" in outcomes[1].value[0]


def absent(rank: int, size: int, store: dist.Store) -> str:
    old, new = rotation()
    sources, targets = {s: slice_of(s) for s in old[rank]}, {s: slice_of(s) for s in new[rank]}
    migration = KeepingMigration(make_plan(old, new), rank, sources, targets, gloo(store, "m", rank, size), timeout_s=2)
    if rank == VICTIM:
        time.sleep(3)
        return "absent"
    with pytest.raises(MigrationError) as caught:
        migration.prepare()
    return str(caught.value)


def test_a_worker_that_does_not_prepare_is_waited_for_no_longer_than_the_timeout() -> None:
    for outcome in run_workers(absent, 3, limit_s=30)[:VICTIM]:
        assert outcome.error is None, outcome.error
        assert "not every worker takes part" in outcome.value


def test_a_full_disk_costs_the_trace_alone(tmp_path: Path) -> None:
    report = MigrationReport(1.0, 1, 1, 0, 1, tuple(Span(f"round {n}", float(n), 1.0) for n in range(100)))
    path = tmp_path / "trace.json"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(MigrationError, match=r"the trace cannot be written to .*; the migration is not"):
            write_trace(path, {0: report})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    write_trace(path, {0: report})
    assert path.exists()
