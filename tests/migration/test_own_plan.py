"""What workers tell each other, and the parts of the plan that they derive from it; ranks are threads here."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

from etc_agent.migration.errors import MigrationError
from etc_agent.migration.modes import ModeRequest, bid_of, choose_mode, choose_together
from etc_agent.migration.own_plan import Change, Described, plan_to_keep, plan_to_release
from etc_agent.migration.release_plan import plan_release
from etc_agent.migration.schedule import schedule_for
from etc_agent.migration.transport.alike import Alike, gather_alike
from etc_agent.migration.transport.peers import Peers
from etc_agent.migration.transport.wire import Wire
from etc_agent.planner.errors import PlanError
from etc_agent.planner.transfers.classes import encode_class
from etc_agent.planner.transfers.migration import make_plan
from etc_agent.planner.transfers.plan import MigrationPlan
from etc_agent.state.boxes import whole
from etc_agent.state.layout import Manifest, Shard
from tests.migration.states import grid, logical

TIMEOUT = timedelta(seconds=60)
T = TypeVar("T")


def together(size: int, work: Callable[[Wire], T]) -> list[T | Exception]:
    """What `work` returns or raises on each of the ranks of a group."""
    store, found = dist.HashStore(), dict[int, T | Exception]()

    def run(rank: int) -> None:
        try:
            found[rank] = work(Wire(dist.ProcessGroupGloo(store, rank, size, TIMEOUT)))
        except (RuntimeError, PlanError, MigrationError) as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[rank] for rank in range(size)]


def told(values: Sequence[bytes], predicted: Sequence[object]) -> list[Alike]:
    found = together(len(values), lambda wire: gather_alike(wire, values[wire.rank], predicted, TIMEOUT))
    for each in found:
        assert isinstance(each, Alike)
        assert [each.values[number] for number in each.class_of] == list(values)
    return found  # type: ignore[return-value]


def test_a_value_that_was_predicted_to_be_alike_travels_once() -> None:
    large = [b"first" * 1000, b"other" * 1000]
    (one, *_) = told([large[0], large[1]] * 3, ["a", "b"] * 3)
    assert (one.was_predicted, one.gathered_bytes) == (True, 10_000)


@pytest.mark.parametrize("odd", [0, 1, 4])
def test_a_wrong_prediction_costs_digests_and_the_values_that_differ(odd: int) -> None:
    values = [b"all alike" * 100] * 5
    values[odd] = b"another"
    (one, *_) = told(values, [0] * 5)
    assert not one.was_predicted
    assert one.gathered_bytes == 900 + 7 + 5 * 16
    told([b"", b"x", b"", b"yy"], [0] * 4)
    told([b"1", b"2", b"3"], [None, 5, (1, 2)])


def change(worker: int, old: Sequence[Manifest], new: Sequence[Manifest]) -> Change:
    sides = []
    for manifests in (old, new):
        texts = [encode_class(each) for each in manifests]
        distinct = list(dict.fromkeys(texts))
        sides.append(Described(tuple(distinct), tuple(map(distinct.index, texts))))
    return Change(*sides, old[worker], new[worker], None)


TENSORS = [logical(f"w{index}", (48, 1 << index), torch.float32) for index in range(9)]
CHANGES = {
    "halves to quarters": ((2, 1), (4, 1), 4), "columns to rows": ((1, 3), (2, 1), 3),
    "one to all": ((1, 1), (4, 1), 4),
}


def manifests(parts: tuple[int, int], size: int) -> list[Manifest]:
    count = parts[0] * parts[1]
    cut = [tuple(grid(tensor, parts)[index] for tensor in TENSORS if tensor.shape[1] >= parts[1])
           for index in range(count)]
    return [*cut, *[()] * (size - count)]


def part_of(plan: MigrationPlan, worker: int) -> list[tuple[int, object]]:
    return [(n, t) for n, each in enumerate(plan.rounds) for t in each if worker in (t.source, t.target)]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("budget", [None, 30_000, 1])
def test_in_release_mode_all_choose_the_rounds_that_the_complete_plan_has(name: str, budget: int | None) -> None:
    before, after, size = CHANGES[name]
    old, new = manifests(before, size), manifests(after, size)
    names = {shard.tensor.name for each in old for shard in each}
    new = [tuple(shard for shard in each if shard.tensor.name in names) for each in new]
    expected = plan_release(old, new, budget)
    found = together(size, lambda wire: plan_to_release(wire, change(wire.rank, old, new), budget, TIMEOUT))
    for worker, own in enumerate(found):
        assert not isinstance(own, Exception), own
        assert part_of(own.plan, worker) == part_of(expected, worker)
        assert own.moved_bytes == expected.moved_bytes


def test_what_one_worker_cannot_plan_all_refuse_with_its_reason() -> None:
    shard = Shard(TENSORS[0], whole(TENSORS[0].shape))
    lost = Shard(logical("lost", (4,), torch.float32), whole((4,)))
    old, new = [(shard,), (), ()], [(shard,), (lost,), (shard,)]
    found = together(3, lambda wire: plan_to_keep(wire, change(wire.rank, old, new), TIMEOUT, forwarding=False))
    assert [str(error) for error in found] == [
        "lost: no live worker holds the box at (0,) of shape (4,), which worker 1 needs"
    ] * 3
    assert all(isinstance(error, PlanError) for error in found)


def test_ends_that_derive_other_messages_are_told_apart_before_anything_moves() -> None:
    shards = [Shard(tensor, whole(tensor.shape)) for tensor in TENSORS[:2]]
    plans = [make_plan([tuple(shards), ()], [(), tuple(each)]) for each in (shards, shards[:1])]
    same = [dataclasses.replace(plan, digest="same") for plan in plans]

    def meet(wire: Wire) -> None:
        Peers(same[wire.rank], wire.rank, wire, 60).meet(schedule_for(same[wire.rank], wire.rank))

    sender, receiver = together(2, meet)
    assert sender is None
    assert "worker 0 would send other messages than this worker expects" in str(receiver)


def test_the_mode_is_chosen_together_as_from_all_bids() -> None:
    shard = Shard(TENSORS[3], whole(TENSORS[3].shape))
    old: list[Manifest] = [(shard,), (), ()]
    new: list[Manifest] = [(), (shard,), (shard,)]
    for requests in (
        [ModeRequest("auto", 0, 1 << 30)] * 3, [ModeRequest("keep", 0, 0)] * 3,
        [ModeRequest("auto", 0, 1 << 30), ModeRequest("auto", 0, 5), ModeRequest("auto", 700, 5)],
        [ModeRequest("keep", 0, 5), ModeRequest("auto", 40, 5), ModeRequest("release", 90, 5)],
    ):
        bids = [bid_of(worker, *each) for worker, each in enumerate(zip(requests, old, new, strict=True))]
        choices = together(3, lambda wire, bids=bids: choose_together(wire, bids[wire.rank], TIMEOUT))
        assert choices == [choose_mode(bids)] * 3
