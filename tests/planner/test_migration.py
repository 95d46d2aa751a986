"""make_plan on real arrays: everything arrives once, from somebody who has it, within the rounds' bounds."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_agent.planner.errors import MissingSourceError, PlanError
from etc_agent.planner.transfers.migration import make_plan
from etc_agent.planner.transfers.plan import MigrationPlan
from etc_agent.state.boxes import Box, whole
from etc_agent.state.layout import LogicalTensor, Manifest, Shard


def cut(size: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and extent of part `index`, as torch.chunk cuts: (6, 4) gives 2, 2, 2, 0."""
    step = -(-size // parts)
    start = min(size, step * index)
    return start, min(size, start + step) - start


def layout(tensors: list[LogicalTensor], pp: int, tp: int, dp: int, dim: int) -> list[Manifest]:
    """Tensor k lives on stage k * pp // len, cut along `dim` over tp (1-dim and smaller tensors are replicated)."""
    manifests: list[Manifest] = []
    for stage in range(pp):
        for _replica in range(dp):
            for part in range(tp):
                shards = []
                for number, tensor in enumerate(tensors):
                    if number * pp // len(tensors) != stage:
                        continue
                    box = whole(tensor.shape)
                    if dim < len(tensor.shape):
                        start, extent = cut(tensor.shape[dim], tp, part)
                        offset, shape = list(box.offset), list(box.shape)
                        offset[dim], shape[dim] = start, extent
                        box = Box(tuple(offset), tuple(shape))
                    shards.append(Shard(tensor, box))
                manifests.append(tuple(shards))
    return manifests


def pad(a: list[Manifest], b: list[Manifest]) -> tuple[list[Manifest], list[Manifest]]:
    size = max(len(a), len(b))
    return a + [()] * (size - len(a)), b + [()] * (size - len(b))


def execute(plan: MigrationPlan, previous: list[Manifest], current: list[Manifest]) -> None:
    """Run the plan on numpy arrays and compare with the logical tensors; every element is written exactly once."""
    logical = {
        shard.tensor.name: np.arange(np.prod(shard.tensor.shape, dtype=int)).reshape(shard.tensor.shape)
        for manifest in [*previous, *current]
        for shard in manifest
    }
    held = [{(s.tensor.name, s.box): logical[s.tensor.name][s.box.within(whole(s.tensor.shape))] for s in m}
            for m in previous]
    new = [{(s.tensor.name, s.box): np.full(s.box.shape, -1) for s in m} for m in current]
    writes = [{key: np.zeros(array.shape, int) for key, array in shards.items()} for shards in new]

    def copy(source: int, target: int, name: str, box: Box, source_box: Box, target_box: Box) -> None:
        data = held[source][name, source_box][box.within(source_box)]
        new[target][name, target_box][box.within(target_box)] = data
        writes[target][name, target_box][box.within(target_box)] += 1

    for refer in plan.refers:
        copy(refer.worker, refer.worker, refer.tensor.name, refer.box, refer.source_box, refer.target_box)
    for transfers in plan.rounds:
        for t in transfers:
            assert t.source != t.target
            copy(t.source, t.target, t.tensor.name, t.box, t.source_box, t.target_box)
    for worker, shards in enumerate(new):
        for (name, box), array in shards.items():
            assert (writes[worker][name, box] == 1).all()
            assert (array == logical[name][box.within(whole(logical[name].shape))]).all()


def check_rounds(plan: MigrationPlan, round_bytes: int, round_transfers: int) -> None:
    for transfers in plan.rounds:
        for worker in range(plan.num_workers):
            sends = [t for t in transfers if t.source == worker]
            receives = [t for t in transfers if t.target == worker]
            for each in (sends, receives):
                assert sum(t.num_bytes for t in each) <= round_bytes or all(t.box.num_elements == 1 for t in each)
            assert len(sends) + len(receives) <= round_transfers


TENSORS = [
    LogicalTensor(f"t{i}", shape, "float32", 4)
    for i, shape in enumerate([(6,), (), (8, 6), (5, 7), (3, 4, 2), (0, 4), (1, 9)])
]
degrees = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.integers(0, 1))


@given(degrees, degrees, st.sampled_from([1, 40, 100, 1 << 20]), st.sampled_from([30, 1000]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_change_of_degrees_gives_every_worker_its_new_shards(before, after, round_bytes, round_transfers, grouped):
    previous, current = pad(layout(TENSORS, *before), layout(TENSORS, *after))
    nodes = [worker // 2 for worker in range(len(current))] if grouped else None
    plan = make_plan(previous, current, round_bytes=round_bytes, round_transfers=round_transfers, nodes=nodes)
    execute(plan, previous, current)
    check_rounds(plan, round_bytes, round_transfers)


@given(degrees, degrees, st.data())
@settings(max_examples=60, deadline=None)
def test_state_lost_with_a_worker_comes_from_a_replica_or_is_refused_by_name(before, after, data):
    previous, current = pad(layout(TENSORS, *before), layout(TENSORS, *after))
    lost = data.draw(st.integers(0, len(previous) - 1))
    previous[lost] = ()
    try:
        plan = make_plan(previous, current)
    except MissingSourceError:
        assert before[2] == 1  # without a replica, and only then
        return
    execute(plan, previous, current)


def test_an_unchanged_worker_keeps_its_storage():
    manifests = layout(TENSORS, 2, 2, 1, 0)
    plan = make_plan(manifests, manifests)
    assert plan.moved_bytes == 0
    assert all(refer.is_whole for refer in plan.refers)


def test_replicas_share_the_sending():
    big = [LogicalTensor("big", (1 << 12, 1 << 10), "float32", 4)]
    previous, current = pad(layout(big, 1, 1, 4, 0), layout(big, 1, 1, 8, 0))
    plan = make_plan(previous, current)
    sent = [sum(t.num_bytes for r in plan.rounds for t in r if t.source == w) for w in range(4)]
    assert sent == [16 << 20] * 4


def test_replicas_that_overlap_only_partly_share_the_sending():
    tensor = LogicalTensor("big", (6 << 10, 1 << 10), "float32", 4)
    shards = [(0, 6), (0, 3), (2, 4)]
    held = [(Shard(tensor, Box((start << 10, 0), (rows << 10, 1 << 10))),) for start, rows in shards]
    plan = make_plan([*held, ()], [*held, (Shard(tensor, whole(tensor.shape)),)])
    sent = [sum(t.num_bytes for r in plan.rounds for t in r if t.source == w) for w in range(3)]
    assert max(sent) <= 9 << 20
    assert sum(sent) == 24 << 20
    for transfer in (t for r in plan.rounds for t in r):
        assert transfer.source_box == held[transfer.source][0].box
        assert transfer.box.intersect(transfer.source_box) == transfer.box


def test_a_source_on_the_own_node_is_preferred():
    one = [LogicalTensor("one", (64,), "float32", 4)]
    previous, current = pad(layout(one, 1, 1, 2, 0), layout(one, 1, 1, 4, 0))
    plan = make_plan(previous, current, nodes=[0, 1, 1, 0])
    assert sorted((t.source, t.target) for r in plan.rounds for t in r) == [(0, 3), (1, 2)]


def test_what_nobody_holds_is_refused_by_name_and_box():
    tensor = LogicalTensor("model.w", (8, 4), "float32", 4)
    with pytest.raises(MissingSourceError, match=r"model\.w: .*\(6, 0\) of shape \(2, 4\).*worker 1"):
        make_plan([(Shard(tensor, Box((0, 0), (6, 4))),), ()], [(), (Shard(tensor, whole((8, 4))),)])


@pytest.mark.parametrize(
    ("previous", "current", "message"),
    [
        (("a", (4,), "float32", 4, (0,), (4,)), ("a", (4,), "bfloat16", 2, (0,), (4,)), "was float32"),
        (("a", (4,), "float32", 4, (0,), (4,)), ("a", (8,), "float32", 4, (0,), (8,)), r"shape \(4,\), and is"),
        (("a", (4,), "float32", 4, (2,), (4,)), ("a", (4,), "float32", 4, (0,), (4,)), "not inside"),
        (("a", (4,), "float32", 4, (0, 0), (4, 1)), ("a", (4,), "float32", 4, (0,), (4,)), "has not the 1 dims"),
        (("b", (4,), "float32", 4, (0,), (4,)), ("a", (4,), "float32", 4, (0,), (4,)), "a: no live worker"),
    ],
)
def test_contradicting_manifests_are_refused(previous, current, message):
    def manifest(name, shape, dtype, itemsize, offset, extent):
        return (Shard(LogicalTensor(name, shape, dtype, itemsize), Box(offset, extent)),)

    with pytest.raises(PlanError, match=message):
        make_plan([manifest(*previous)], [manifest(*current)])


def test_overlapping_shards_of_one_worker_are_refused():
    tensor = LogicalTensor("a", (4,), "float32", 4)
    twice = (Shard(tensor, Box((0,), (3,))), Shard(tensor, Box((2,), (2,))))
    with pytest.raises(PlanError, match="overlapping"):
        make_plan([(Shard(tensor, whole((4,))),)], [twice])


def test_the_digest_is_the_same_under_any_hash_seed():
    code = (
        "from tests.planner.test_migration import *\n"
        "print(make_plan(*pad(layout(TENSORS, 2, 2, 2, 0), layout(TENSORS, 3, 1, 1, 1)), round_bytes=64).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, text=True,
            capture_output=True, check=True,
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(digests) == 1
