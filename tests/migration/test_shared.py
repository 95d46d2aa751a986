"""Memory that workers of one host share: how long its pages live."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch

from etc_agent.migration.memory.shared import SharedMemory, arena_layout
from etc_agent.planner.transfers.migration import make_plan
from etc_agent.planner.transfers.plan import MigrationPlan
from etc_agent.state.boxes import whole
from etc_agent.state.layout import Manifest, Shard
from tests.migration.states import grid, logical

_MB = 1 << 20


def cut_in_two(count: int) -> MigrationPlan:
    """One worker whose `count` matrices of 1 MiB fall into halves, and which has a few small tensors besides."""
    tensors = [logical(f"w{n}", (512, 512), torch.float32) for n in range(count)]
    small = [logical(f"b{n}", (6,), torch.bfloat16) for n in range(5)]
    old: Manifest = tuple(Shard(t, whole(t.shape)) for t in (*tensors, *small))
    new: Manifest = tuple(half for t in (*tensors, *small) for half in grid(t, (2,) + (1,) * (len(t.shape) - 1)))
    return make_plan([old], [new])


def shared_mb() -> float:
    """What this process has resident of shared memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssShmem"))


def test_a_tensor_that_stays_over_generations_holds_its_own_pages_alone() -> None:
    plan = cut_in_two(16)
    gc.collect()  # what earlier tests have left
    before, files = shared_mb(), len(os.listdir("/proc/self/fd"))
    stayed = []
    for generation in range(12):
        memory = SharedMemory(plan, 0)
        assert shared_mb() - before >= 16
        tensors = memory.tensors
        memory.close()
        del memory
        shard = next(s for s in tensors if s.tensor.name == f"w{generation}")
        tensors[shard].fill_(generation)
        stayed.append(tensors[shard])
        del tensors
        gc.collect()
        assert shared_mb() - before <= 0.5 * (generation + 1) + 0.5
    assert len(os.listdir("/proc/self/fd")) == files
    assert all(bool((tensor == generation).all()) for generation, tensor in enumerate(stayed))
    stayed.clear()
    gc.collect()
    assert shared_mb() - before < 0.5


def test_a_view_keeps_the_pages_of_its_tensor() -> None:
    tensors = SharedMemory(cut_in_two(1), 0).tensors
    shard = next(s for s in tensors if s.tensor.name == "w0")
    row = tensors[shard].fill_(3)[7]
    del tensors
    gc.collect()
    assert row.tolist() == [3.0] * 512


def test_large_tensors_have_pages_of_their_own_and_small_ones_share_some() -> None:
    parcels, size = arena_layout(cut_in_two(3), 0)
    assert all(parcel.start % 4096 == 0 == parcel.end % 4096 for parcel in parcels)
    assert [len(parcel.starts) for parcel in sorted(parcels, key=lambda p: len(p.starts))] == [1] * 6 + [10]
    assert size == parcels[-1].end == 6 * _MB // 2 + 4096


def test_a_forked_child_that_drops_a_tensor_takes_nothing_from_its_parent() -> None:
    tensors = SharedMemory(cut_in_two(1), 0).tensors
    for tensor in tensors.values():
        tensor.fill_(5)
    child = os.fork()
    if child == 0:
        del tensor
        tensors.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert all(bool((tensor == 5).all()) for tensor in tensors.values())
