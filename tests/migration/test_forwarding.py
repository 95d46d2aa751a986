"""Plans in which receivers send on what they have received: dp grows without one worker sending every copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from etc_agent.migration.keep import KeepingMigration
from etc_agent.migration.memory.shared import SharedMemory
from etc_agent.migration.protocol import Migration
from etc_agent.migration.release import ReleasingMigration
from etc_agent.planner.transfers.migration import make_plan
from etc_agent.planner.transfers.plan import MigrationPlan
from etc_agent.state.boxes import whole
from etc_agent.state.layout import Manifest, Shard
from tests.migration.processes import gloo, run_workers, values
from tests.migration.states import grid, logical, same_bits, slice_of, zeros

WORKERS = 4


def from_one_to_all() -> tuple[list[Manifest], list[Manifest]]:
    """Worker 0 has it all. Then everyone has a copy: of a large tensor, small ones, and one that was cut by columns."""
    large = logical("large", (1024, 768), torch.float32)
    tensors = [large, logical("bias", (77,), torch.bfloat16), logical("step", (), torch.float32)]
    columns = logical("columns", (600, 400), torch.float16)
    copies = tuple(Shard(t, whole(t.shape)) for t in tensors)
    left, right = grid(columns, (1, 2))
    return [(*copies, Shard(columns, whole(columns.shape))), (), (), ()], [(*copies, left), *[(*copies, right)] * 3]


def plan_of(round_bytes: int) -> MigrationPlan:
    return make_plan(*from_one_to_all(), round_bytes=round_bytes, forwarding=True)


def grow(rank: int, size: int, store: dist.Store, mode: str, round_bytes: int) -> Any:
    old, new = from_one_to_all()
    plan = plan_of(round_bytes)
    group = gloo(store, "m", rank, size)
    sources = {shard: slice_of(shard) for shard in old[rank]}
    if mode == "release":
        migration: Migration = ReleasingMigration(
            plan, rank, sources, group, timeout_s=20, verify=True, budget_bytes=1 << 30
        )
    else:
        memory = SharedMemory(plan, rank) if mode == "shared" else None
        targets = {shard: sources[shard] if shard in sources else zeros(shard) for shard in new[rank]}
        targets |= memory.tensors if memory else {}
        migration = KeepingMigration(plan, rank, sources, targets, group, timeout_s=20, memory=memory, verify=True)
    migration.prepare()
    report = migration.run()
    return [s for s in new[rank] if not same_bits(migration.targets[s], slice_of(s))], report.sent_bytes


@pytest.mark.parametrize(
    ("mode", "round_bytes"), [("own", 64 << 20), ("own", 200_000), ("shared", 200_000), ("release", 200_000)]
)
def test_every_copy_arrives_and_nobody_sends_them_all(mode: str, round_bytes: int) -> None:
    assert any(transfer.forwarded for transfers in plan_of(round_bytes).rounds for transfer in transfers)
    copy_bytes = sum(shard.num_bytes for shard in from_one_to_all()[1][1])
    outcomes = values(run_workers(grow, WORKERS, mode, round_bytes))
    assert [wrong for wrong, _ in outcomes] == [[]] * WORKERS
    sent = [sent for _, sent in outcomes]
    assert sum(sent) == 3 * copy_bytes
    assert max(sent) < 2 * copy_bytes
