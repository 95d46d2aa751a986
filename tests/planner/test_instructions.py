"""A worker's own part of a plan, by rule from classes of manifests, is its part of the complete plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from etc_agent.parallel.config import ParallelConfig
from etc_agent.planner.errors import MissingSourceError, PlanError
from etc_agent.planner.transfers.classes import Side
from etc_agent.planner.transfers.instructions import Instructor
from etc_agent.planner.transfers.migration import make_plan
from etc_agent.state.boxes import Box, whole
from etc_agent.state.layout import LogicalTensor, Manifest, Shard
from etc_agent.state.model import ModelDescription, StateKind
from etc_agent.state.sharding import Sharding, refusal
from tests.planner.test_properties import configs, models

MODEL = ModelDescription(
    "m", num_layers=4, hidden=8, num_heads=4, num_kv_heads=2, vocab=13, ffn_hidden=6, vocab_multiple=2, gated=True,
    kinds=(StateKind("model", "bfloat16", 2, sharded=False), StateKind("optimizer.exp_avg", "float32", 4)),
)


def assert_own_parts_are_the_plan(
    old: Sequence[Manifest], new: Sequence[Manifest], nodes: Sequence[int], *, round_bytes: int, round_transfers: int,
    forwarding: bool, old_places: Sequence[str | None] = (), new_places: Sequence[str | None] = (),
) -> None:
    limits = {"round_bytes": round_bytes, "round_transfers": round_transfers}
    previous, current = Side.of(old, old_places), Side.of(new, new_places)

    def instructor(worker: int) -> Instructor:
        return Instructor(worker, previous, current, old[worker], new[worker], nodes, forwarding=forwarding)

    try:
        plan = make_plan(old, new, nodes=nodes, forwarding=forwarding, **limits)
    except MissingSourceError as error:
        found = []
        for worker in range(len(nodes)):
            try:
                instructor(worker)
            except MissingSourceError as own:
                found.append(str(own).partition(":")[0])
        assert str(error).partition(":")[0] in found  # noqa: PT017
        return
    instructors = [instructor(worker) for worker in range(len(nodes))]
    regions = max(each.num_regions for each in instructors)
    for worker, each in enumerate(instructors):
        own = each.plan(round_bytes, round_transfers, regions, "digest")
        assert set(own.refers) == {refer for refer in plan.refers if refer.worker == worker}
        expected = [tuple(t for t in r if worker in (t.source, t.target)) for r in plan.rounds]
        while expected and not expected[-1]:
            expected.pop()
        assert own.rounds == tuple(expected)


@given(models(), configs(), configs(), st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_own_instructions_are_those_of_the_complete_plan(model, before, after, data):
    for config in (before, after):
        assume(not (model.num_experts == 0 and config.ep > 1))
        assume(refusal(model, config) is None)
    layouts = Sharding(model, before).layout(), Sharding(model, after).layout()
    size = max(before.num_ranks, after.num_ranks) + data.draw(st.integers(0, 2))
    numbers = data.draw(st.permutations(range(size)))
    old, new = list(layouts[0]) + [()] * (size - before.num_ranks), [()] * size
    for rank, worker in enumerate(numbers[: after.num_ranks]):
        new[worker] = layouts[1][rank]
    for lost in data.draw(st.sets(st.sampled_from(range(before.num_ranks)), max_size=1)):
        old[lost] = ()
    nodes = [worker // data.draw(st.sampled_from([1, 2, 3, 8])) for worker in range(size)]
    assert_own_parts_are_the_plan(
        old, new, nodes, round_bytes=data.draw(st.sampled_from([16, 300, 1 << 20])),
        round_transfers=data.draw(st.sampled_from([20, 1024])), forwarding=data.draw(st.booleans()),
    )


PAIRS = [(a, b) for a in range(1, 5) for b in range(1, 5)]


@pytest.mark.parametrize("forwarding", [False, True])
def test_replicas_that_come_and_go_on_several_nodes_with_streams_of_their_own(forwarding: bool) -> None:
    big, small = LogicalTensor("big", (64, 1 << 16), "float32", 4), LogicalTensor("small", (8,), "float32", 4)

    def manifests(dp: int, workers: Sequence[int], size: int) -> tuple[list[Manifest], list[str | None]]:
        found: list[Manifest] = [()] * size
        places: list[str | None] = [None] * size
        for rank, worker in enumerate(workers):
            stream = LogicalTensor(f"rng.dp{rank}", (16,), "uint8", 1)
            found[worker] = tuple(Shard(each, whole(each.shape)) for each in (big, small, stream))
            places[worker] = f"dp{rank}"
        return found, places

    for before, after in PAIRS:
        size = max(before, after) + 1
        old, old_places = manifests(before, range(before), size)
        new, new_places = manifests(after, range(size - after, size), size)
        shared = {f"dp{rank}" for rank in range(min(before, after))}
        old, new = (
            [tuple(s for s in m if not s.tensor.name.startswith("rng.") or s.tensor.name[4:] in shared) for m in side]
            for side in (old, new)
        )
        for nodes in (range(size), [0] * size, [worker // 2 for worker in range(size)]):
            assert_own_parts_are_the_plan(
                old, new, list(nodes), round_bytes=4 << 20, round_transfers=1024, forwarding=forwarding,
                old_places=old_places, new_places=new_places,
            )


spans = st.tuples(st.integers(0, 11), st.integers(1, 12)).map(lambda span: (span[0], min(span[1], 12 - span[0])))


@given(st.lists(spans, min_size=1, max_size=4), st.lists(spans, min_size=1, max_size=3), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_so_are_they_where_holders_overlap_in_any_way(held, needed, forwarding, grouped):
    tensor = LogicalTensor("w", (12, 1 << 18), "float32", 4)

    def shard(span: tuple[int, int]) -> Manifest:
        return (Shard(tensor, Box((span[0], 0), (span[1], 1 << 18))),)

    old = [*map(shard, held), *[()] * len(needed)]
    new = [*[()] * len(held), *map(shard, needed)]
    nodes = [worker // 2 if grouped else worker for worker in range(len(old))]
    assert_own_parts_are_the_plan(
        old, new, nodes, round_bytes=8 << 20, round_transfers=1024, forwarding=forwarding
    )


def test_workers_with_equal_manifests_share_a_class_also_where_each_has_a_tensor_of_its_own():
    tensor = LogicalTensor("w", (4,), "float32", 4)
    streams = [LogicalTensor(f"rng.dp{rank}", (16,), "uint8", 1) for rank in range(3)]
    manifests = [(Shard(tensor, whole((4,))), Shard(stream, whole((16,)))) for stream in streams]
    places = [f"dp{rank}" for rank in range(3)]
    side = Side.of(manifests, places)
    assert len(side.classes) == 1
    assert {side.classes[0].manifest(place) for place in places} == set(manifests)
    assert side.classes[0].names() == {"w"}


def test_a_copy_of_a_lost_worker_s_stream_is_found_by_its_full_name():
    stream = LogicalTensor("rng.dp1", (16,), "uint8", 1)
    shard = Shard(stream, whole((16,)))
    assert_own_parts_are_the_plan(
        [(shard,), ()], [(), (shard,)], [0, 1], round_bytes=1 << 20, round_transfers=99, forwarding=False,
        old_places=["dp0", None], new_places=[None, "dp1"],
    )


def test_contradicting_manifests_are_refused():
    wide, narrow = LogicalTensor("w", (4,), "float32", 4), LogicalTensor("w", (8,), "float32", 4)
    held, needed = (Shard(wide, whole((4,))),), (Shard(narrow, whole((8,))),)
    outside, twice = (Shard(wide, Box((2,), (4,))),), (Shard(wide, Box((0,), (3,))), Shard(wide, Box((2,), (2,))))
    for old, new, message in [
        (held, needed, "on another"), (outside, held, "not inside"), (held, twice, "overlapping"),
        ((), held, "no live worker"),
    ]:
        with pytest.raises(PlanError, match=message):
            Instructor(0, Side.of([old]), Side.of([new]), old, new, [0], forwarding=False)


@pytest.mark.parametrize("forwarding", [False, True])
def test_holders_of_one_part_send_equally_much(forwarding):
    model = replace(MODEL, hidden=64, num_heads=4, ffn_hidden=96)
    old, new = (Sharding(model, ParallelConfig(dp=dp)).layout() for dp in (4, 12))
    previous, current = Side.of([*old, *[()] * 8]), Side.of(new)
    sent = []
    for worker in range(4):
        own = Instructor(worker, previous, current, old[worker], new[worker], range(12), forwarding=forwarding)
        plan = own.plan(1 << 20, 1024, own.num_regions, "digest")
        sent.append(sum(t.num_bytes for each in plan.rounds for t in each if t.source == worker))
    assert max(sent) <= 1.05 * min(sent)
