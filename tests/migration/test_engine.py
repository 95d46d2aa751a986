"""Plans run on real tensors between real processes, against gather-and-slice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from etc_agent.migration.errors import MigrationError
from etc_agent.migration.keep import KeepingMigration
from etc_agent.migration.memory.shared import SharedMemory
from etc_agent.planner.transfers.plan import MigrationPlan
from etc_agent.state.boxes import Box, whole
from etc_agent.state.layout import Manifest, Shard
from tests.migration.processes import gloo, run_workers, values
from tests.migration.states import full_value, grid, logical, naive_plan, same_bits, slice_of

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def tp_layouts(old_tp: int, new_tp: int, workers: int) -> tuple[list[Manifest], list[Manifest]]:
    """Row- and column-split matrices of every dtype, replicated vectors and scalars, and a large matrix each way."""
    rows = [logical(f"rows.{d}", (24, 10), d) for d in DTYPES] + [logical("rows.large", (1024, 512), torch.float32)]
    columns = [logical(f"columns.{d}", (6, 24), d) for d in DTYPES]
    columns.append(logical("columns.large", (512, 1024), torch.float32))
    copies = [logical("norm", (33,), torch.bfloat16), logical("step", (), torch.float32)]
    copies.append(logical("uneven", (6, 3), torch.float32))

    def layout(tp: int) -> list[Manifest]:
        cut = [grid(t, (tp, 1)) for t in (*rows, copies[2])] + [grid(t, (1, tp)) for t in columns]
        return [
            (*(shards[rank] for shards in cut), *(Shard(t, whole(t.shape)) for t in copies[:2])) if rank < tp else ()
            for rank in range(workers)
        ]

    return layout(old_tp), layout(new_tp)


def migrate(
    rank: int, size: int, store: dist.Store, plan: MigrationPlan, old: list[Manifest], new: list[Manifest], memory: str
) -> Any:
    sources = {shard: slice_of(shard) for shard in old[rank]}
    targets = {shard: torch.full_like(slice_of(shard), 1) for shard in new[rank]}
    shared = SharedMemory(plan, rank) if memory == "shared" or (memory == "mixed" and rank % 2) else None
    if shared is not None:
        targets |= shared.tensors
    group = gloo(store, "m", rank, size)
    migration = KeepingMigration(plan, rank, sources, targets, group, timeout_s=20, memory=shared)
    migration.prepare()
    report = migration.run()
    wrong = [shard.tensor.name for shard, tensor in targets.items() if not same_bits(tensor, slice_of(shard))]
    changed = [shard.tensor.name for shard, tensor in sources.items() if not same_bits(tensor, slice_of(shard))]
    return wrong, changed, report


SPLITS = ((2, 4), (4, 2), (3, 4), (4, 3), (1, 4))


def migrate_every_split(rank: int, size: int, store: dist.Store, per_round: int, memory: str) -> Any:
    return [
        migrate(rank, size, dist.PrefixStore(str(split), store), naive_plan(*tp_layouts(*split, 4), per_round),
                *tp_layouts(*split, 4), memory)
        for split in SPLITS
    ]


@pytest.mark.parametrize(("per_round", "memory"), [(7, "own"), (1 << 30, "own"), (7, "shared"), (7, "mixed")])
def test_every_dtype_and_split_arrives_bit_for_bit_and_sources_stay(per_round: int, memory: str) -> None:
    by_worker = values(run_workers(migrate_every_split, 4, per_round, memory))
    for split, outcomes in zip(SPLITS, zip(*by_worker, strict=True), strict=True):
        for wrong, changed, _ in outcomes:
            assert wrong == []
            assert changed == []
        moved = naive_plan(*tp_layouts(*split, 4), per_round).moved_bytes
        reports = [report for _, _, report in outcomes]
        assert sum(r.sent_bytes for r in reports) == sum(r.received_bytes for r in reports) == moved


def two_halves() -> tuple[list[Manifest], list[Manifest]]:
    """One tensor on worker 0 alone, then half each; and one that stays whole on worker 0."""
    split, stays = logical("split", (8, 6), torch.float32), logical("stays", (5,), torch.bfloat16)
    top, bottom = grid(split, (2, 1))
    return [(Shard(split, whole((8, 6))), Shard(stays, whole((5,)))), ()], [(top, Shard(stays, whole((5,)))), (bottom,)]


def refer_and_refresh(rank: int, size: int, store: dist.Store) -> Any:
    old, new = two_halves()
    plan = naive_plan(old, new)
    sources = {shard: slice_of(shard) for shard in old[rank]}
    targets = {shard: torch.zeros_like(slice_of(shard)) for shard in new[rank]}
    for shard in set(sources) & set(targets):
        targets[shard] = sources[shard]
    migration = KeepingMigration(plan, rank, sources, targets, gloo(store, "m", rank, size), timeout_s=20)
    migration.prepare()
    # The optimizer replaces a tensor: other memory, other strides, other values.
    replaced = {shard: (tensor.float() + 1).to(tensor.dtype).t().contiguous().t() for shard, tensor in sources.items()}
    for shard in set(sources) & set(targets):
        replaced[shard] = sources[shard]
    migration.refresh(replaced)
    report = migration.run()
    return [(s.tensor.name, t) for s, t in targets.items()], report.referred_bytes, report.sent_bytes


def test_a_replaced_source_is_taken_over_and_a_whole_refer_costs_nothing() -> None:
    first, second = values(run_workers(refer_and_refresh, 2))
    expected = full_value(logical("split", (8, 6), torch.float32)) + 1
    assert same_bits(dict(first[0])["split"], expected[:4])
    assert same_bits(dict(second[0])["split"], expected[4:])
    assert same_bits(dict(first[0])["stays"], full_value(logical("stays", (5,), torch.bfloat16)))
    assert first[1:] == (4 * 6 * 4 + 5 * 2, 4 * 6 * 4)


def strided_targets(rank: int, size: int, store: dist.Store) -> Any:
    old, new = two_halves()
    sources = {shard: slice_of(shard) for shard in old[rank]}
    targets = {shard: torch.zeros_like(slice_of(shard)).t().contiguous().t() for shard in new[rank]}
    group = gloo(store, "m", rank, size)
    migration = KeepingMigration(naive_plan(old, new), rank, sources, targets, group, timeout_s=20)
    migration.prepare()
    migration.run()
    return [same_bits(tensor, slice_of(shard)) for shard, tensor in targets.items()]


def test_tensors_whose_storage_is_not_contiguous_are_filled_in_place() -> None:
    for arrived in values(run_workers(strided_targets, 2)):
        assert all(arrived)


def empty_shards(rank: int, size: int, store: dist.Store) -> Any:
    tensor = logical("six", (6,), torch.float32)
    four, two = grid(tensor, (4,)), grid(tensor, (2,))
    old, new = [(shard,) for shard in four], [(two[0],), (two[1],), (), ()]
    sources = {shard: slice_of(shard) for shard in old[rank]}
    targets = {shard: torch.zeros(shard.box.shape) for shard in new[rank]}
    group = gloo(store, "m", rank, size)
    migration = KeepingMigration(naive_plan(old, new), rank, sources, targets, group, timeout_s=20)
    migration.prepare()
    migration.run()
    return all(same_bits(tensor, slice_of(shard)) for shard, tensor in targets.items())


def test_empty_shards_are_legal() -> None:
    assert [shard.box.shape for shard in grid(logical("six", (6,), torch.float32), (4,))] == [(2,), (2,), (2,), (0,)]
    assert all(values(run_workers(empty_shards, 4)))


class _Group:
    """Stands in for a process group where the border check must fail before any message."""

    def name(self) -> str:
        return "gloo"

    def size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (torch.zeros(8, 5), r"worker 0: old shard of 'split' \[0:8, 0:6\]: expected shape \(8, 6\).*got \(8, 5\)"),
        (torch.zeros(8, 6, dtype=torch.int32), r"'split' \[0:8, 0:6\]: expected float32 of 4 bytes.*got int32"),
        (torch.zeros(8, 6, device="meta"), r"'split' \[0:8, 0:6\].*device meta"),
        (None, r"worker 0: the plan names an old shard of 'split' \[0:8, 0:6\] that this worker did not bring"),
    ],
)
def test_a_tensor_unlike_its_manifest_is_refused_by_name(tensor: torch.Tensor | None, complaint: str) -> None:
    old, new = two_halves()
    shard = Shard(logical("split", (8, 6), torch.float32), Box((0, 0), (8, 6)))
    sources = {shard: slice_of(shard) for shard in old[0]}
    if tensor is None:
        del sources[shard]
    else:
        sources[shard] = tensor
    with pytest.raises(MigrationError, match=complaint):
        KeepingMigration(naive_plan(old, new), 0, sources, {s: slice_of(s) for s in new[0]}, _Group(), timeout_s=1)


def another_plan(rank: int, size: int, store: dist.Store) -> Any:
    old, new = two_halves()
    plan = naive_plan(old, new, 1 if rank == 1 else 2)
    sources, targets = {s: slice_of(s) for s in old[rank]}, {s: slice_of(s) for s in new[rank]}
    with pytest.raises(MigrationError) as caught:
        KeepingMigration(plan, rank, sources, targets, gloo(store, "m", rank, size), timeout_s=20).prepare()
    return str(caught.value)


def test_a_worker_with_another_plan_is_named_before_anything_moves() -> None:
    first, second = values(run_workers(another_plan, 2))
    assert first.startswith("worker 0: the plan of worker 1 differs from mine")
    assert second.startswith("worker 1: the plan of worker 0 differs from mine")
