"""What people see of a migration: the bar, the trace; and what a damaged box looks like."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from etc_agent.migration.errors import MigrationError
from etc_agent.migration.hashes import box_hash
from etc_agent.migration.keep import KeepingMigration
from etc_agent.migration.memory import bits
from etc_agent.migration.progress import ProgressBar
from etc_agent.migration.report import MemoryPoint, MigrationReport, Span
from etc_agent.migration.trace import write_trace
from etc_agent.planner.transfers.migration import make_plan
from tests.migration.processes import gloo, run_workers
from tests.migration.states import slice_of, zeros
from tests.migration.test_engine import two_halves


def test_the_bar_appears_only_when_a_migration_takes_long() -> None:
    short, long = io.StringIO(), io.StringIO()
    with ProgressBar(Console(file=short, force_terminal=True)) as bar:
        bar(1, 2)
    with ProgressBar(Console(file=long, force_terminal=True), show_after_s=0) as bar:
        bar(1 << 20, 2 << 20)
        bar(2 << 20, 2 << 20)
    assert short.getvalue() == ""
    assert "migration" in long.getvalue()


def test_a_trace_has_every_span_and_the_memory_of_every_worker(tmp_path: Path) -> None:
    report = MigrationReport(0.5, 1, 2, 3, 1, (Span("post round 0", 10.0, 0.5),), (MemoryPoint(10.25, 4096),))
    write_trace(tmp_path / "trace.json", {0: report, 1: report})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(event["pid"], event["ts"], event["dur"]) for event in spans] == [(0, 10e6, 5e5), (1, 10e6, 5e5)]
    assert [event["args"]["bytes"] for event in events if event["ph"] == "C"] == [4096, 4096]


def test_the_hash_of_a_box_does_not_depend_on_strides() -> None:
    tensor = torch.randn(16, 12)
    assert box_hash(tensor) == box_hash(tensor.t().contiguous().t())
    assert box_hash(tensor) != box_hash(tensor.t())
    assert tensor.untyped_storage().resizable()


def damaged(rank: int, size: int, store: dist.Store) -> str | None:
    old, new = two_halves()
    sources = {shard: slice_of(shard) for shard in old[rank]}
    targets = {shard: zeros(shard) for shard in new[rank]}
    migration = KeepingMigration(
        make_plan(old, new), rank, sources, targets, gloo(store, "m", rank, size), timeout_s=10, verify=True
    )
    migration.prepare()
    if rank == 1:
        _flip_a_bit_when_copying()
    try:
        migration.run()
    except MigrationError as error:
        return str(error)
    return None


def _flip_a_bit_when_copying() -> None:
    """Memory that goes bad on the receiver, after the bytes have arrived."""
    import etc_agent.migration.hashes as hashes

    honest = hashes.box_hash

    def bad(view: torch.Tensor) -> bytes:
        bits.as_bytes(view)[0] ^= 1
        return honest(view)

    hashes.box_hash = bad


def test_verify_names_the_box_that_arrived_damaged() -> None:
    first, second = run_workers(damaged, 2)
    assert first.value is None
    assert second.value is not None, second.error
    assert "'split' [4:8, 0:6] from worker 0 arrived damaged" in second.value
