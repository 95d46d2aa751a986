"""`etc_agent.migrate`: two layouts and a process group are enough."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import etc_agent
from etc_agent.migration.errors import MigrationError
from etc_agent.migration.release import ReleasingMigration
from etc_agent.migration.release_plan import expected_peaks_bytes, plan_release
from etc_agent.planner.errors import MissingSourceError
from etc_agent.state.boxes import whole
from etc_agent.state.layout import LogicalTensor, Manifest, Shard
from tests.migration.processes import gloo, run_workers, values
from tests.migration.states import grid, logical, same_bits, slice_of
from tests.migration.test_engine import tp_layouts
from tests.migration.test_release import matrices


def right(found: dict[Shard, torch.Tensor]) -> bool:
    return all(same_bits(tensor, slice_of(shard)) for shard, tensor in found.items())


def in_place_and_disjoint(rank: int, size: int, store: dist.Store) -> Any:
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=size)
    outcomes = []
    old, new = tp_layouts(2, 4, 4)
    for mode in ("keep", "release"):
        have = {shard: slice_of(shard) for shard in old[rank]}
        found = etc_agent.migrate(have, new[rank], mode=mode, verify=True)
        outcomes.append(right(found) and set(found) == set(new[rank]))
    # Trainers 0 and 1 hold it; servers 2 and 3 get it cut the other way.
    weights = logical("weights", (64, 48), torch.bfloat16)
    rows, columns = grid(weights, (2, 1)), grid(weights, (1, 2))
    have = {rows[rank]: slice_of(rows[rank])} if rank < 2 else {}
    found = etc_agent.migrate(have, [columns[rank - 2]] if rank >= 2 else [], gloo(store, "raw", rank, size))
    outcomes.append(right(found) and right(have) and len(found) == (rank >= 2))
    kept = Shard(weights, whole((64, 48)))
    mine = {kept: slice_of(kept)} if rank == 0 else {}
    found = etc_agent.migrate(mine, [kept])
    outcomes.append(right(found) and (rank > 0 or found[kept] is mine[kept]))
    try:
        etc_agent.migrate({}, [kept])
    except MissingSourceError as error:
        outcomes.append("weights" in str(error))
    dist.destroy_process_group()
    return outcomes


def test_between_layouts_in_place_to_other_ranks_and_to_more_of_them() -> None:
    for outcomes in values(run_workers(in_place_and_disjoint, 4)):
        assert outcomes == [True] * 5


def with_budgets(rank: int, size: int, store: dist.Store) -> Any:
    """Rank 0 allows less than by default, which smaller rounds keep to; then next to nothing."""
    group = gloo(store, "m", rank, size)
    old, new = matrices(24, 2, 4, 4)
    tight = expected_peaks_bytes(plan_release(old, new), old)[0] - (256 << 10)
    have = {shard: slice_of(shard) for shard in old[rank]}
    found = etc_agent.migrate(have, new[rank], group, mode="release", budget_bytes=tight if rank == 0 else None)
    kept = {shard: slice_of(shard) for shard in old[rank]}
    with pytest.raises(MigrationError) as refused:
        etc_agent.migrate(kept, new[rank], group, mode="release", budget_bytes=1000 if rank == 0 else None)
    return right(found), right(kept), str(refused.value)


def test_each_rank_has_its_own_budget() -> None:
    outcomes = values(run_workers(with_budgets, 4))
    assert all(moved and kept for moved, kept, _ in outcomes)
    assert "the budget is 1,000" in outcomes[0][2]
    assert "worker 0 cannot take part" in outcomes[1][2]


def footprint() -> tuple[int, int, int, int]:
    """Open files, threads, resident KiB, our entries in /dev/shm."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    shared = sum(name.startswith("etc-run") for name in os.listdir("/dev/shm"))
    return len(os.listdir("/proc/self/fd")), int(status["Threads"]), int(status["VmRSS"].split()[0]), shared


def many(rank: int, size: int, store: dist.Store) -> Any:
    group = gloo(store, "m", rank, size)
    tensor = logical("w", (256, 1024), torch.float32)
    halves, quarters = grid(tensor, (2, 1)), grid(tensor, (4, 1))
    layouts: list[list[Manifest]] = [
        [(halves[0],), (halves[1],)],
        [(quarters[0], quarters[3]), (quarters[1], quarters[2])],
    ]
    state = {shard: slice_of(shard) for shard in layouts[0][rank]}
    before = (0, 0, 0, 0)
    for number in range(200):
        mode = "release" if number % 4 >= 2 else "keep"
        state = etc_agent.migrate(state, layouts[(number + 1) % 2][rank], group, mode=mode)
        if number == 60:
            gc.collect()
            before = footprint()
    gc.collect()
    return right(state), before, footprint()


def test_two_hundred_migrations_in_one_process_leave_nothing_behind() -> None:
    for correct, before, after in values(run_workers(many, 2)):
        assert correct
        files, threads, resident_kib, shared = (b - a for a, b in zip(before, after, strict=True))
        assert files <= 1
        assert threads <= 0
        assert resident_kib < 12 << 10  # 140 states of 512 KiB would be 70 MiB
        assert shared <= 0


def misfits(rank: int, size: int, store: dist.Store) -> list[str]:
    """What every rank is told where one brings or asks for something else than it should."""
    group = gloo(store, "m", rank, size)
    shard = Shard(logical("w", (6, 4), torch.complex64), whole((6, 4)))
    odd = [
        (slice_of(shard).real, shard, "keep"),
        (slice_of(shard)[:3], shard, "keep"),
        (slice_of(shard).conj(), shard, "keep"),
        (slice_of(shard), Shard(LogicalTensor("w", (6, 4), "float33", 8), whole((6, 4))), "keep"),
        (slice_of(shard), shard, "release"),
    ]
    told = []
    for case in odd:
        have, need, mode = case if rank == 1 else (slice_of(shard), shard, "keep")
        with pytest.raises(MigrationError) as caught:
            etc_agent.migrate({shard: have}, [need], group, mode=mode, timeout_s=3600)
        told.append(str(caught.value))
    return told


def test_all_ranks_are_told_at_once_which_one_does_not_fit() -> None:
    first, *others = values(run_workers(misfits, 3))
    assert all(told == first for told in others)
    for said, expected in zip(
        first, ("got float32 of 4", "got (3, 4)", "resolve_conj()", "'float33' is no dtype", "rank 1 for"), strict=True
    ):
        assert expected in said
    assert all("worker 1:" in said and "'w' [0:6, 0:4]" in said for said in first[:4])


def beside_traffic(rank: int, size: int, store: dist.Store) -> bool:
    """A script's own receives are open while its group migrates."""
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=size)
    incoming = [torch.zeros(100) for _ in range(3)]
    open_receives = [dist.irecv(t, src=1 - rank, tag=tag) for tag, t in enumerate(incoming)]
    tensor = logical("w", (512, 512), torch.float32)
    rows, columns = grid(tensor, (2, 1)), grid(tensor, (1, 2))
    found = [
        etc_agent.migrate({rows[rank]: slice_of(rows[rank])}, [columns[rank]], mode=mode, timeout_s=20)
        for mode in ("keep", "release")
    ]
    for tag in range(3):
        dist.send(torch.full((100,), float(tag)), dst=1 - rank, tag=tag)
    for work in open_receives:
        work.wait()
    dist.destroy_process_group()
    return all(map(right, found)) and all(bool((t == tag).all()) for tag, t in enumerate(incoming))


def test_messages_of_a_script_over_the_same_group_are_left_alone() -> None:
    assert values(run_workers(beside_traffic, 2)) == [True, True]


def give_up(rank: int, size: int, store: dist.Store) -> str:
    """Worker 0 stops. Worker 1, which waits for it, gives up; worker 2, which waits for worker 1, would for an hour."""
    tensors = [logical(f"w{index}", (256, 1024), torch.float32) for index in range(24)]
    first, second = ([Shard(t, whole(t.shape)) for t in half] for half in (tensors[:12], tensors[12:]))
    old: list[Manifest] = [tuple(first), tuple(second), ()]
    new: list[Manifest] = [(), tuple(first), tuple(second)]
    if rank == 0:
        ReleasingMigration.run = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[assignment, method-assign]
    group = gloo(store, "m", rank, size)
    have = {shard: slice_of(shard) for shard in old[rank]}
    try:
        etc_agent.migrate(have, new[rank], group, mode="release", timeout_s=2 if rank == 1 else 3600)
    except MigrationError as error:
        store.set(f"failed{rank}", "")
        store.wait(["failed1", "failed2"])  # while the error is alive
        return str(error)
    return "done"


def test_who_gives_up_is_not_waited_for() -> None:
    _, second, third = run_workers(give_up, 3, limit_s=40, silent=[0])
    assert "from worker 0 failed: timed out after 2 s" in second.value
    assert "from worker 1 failed: its process has ended, or its migration has failed" in third.value
