"""A plan for `release` mode: the largest rounds with which every worker stays inside its budget."""

from __future__ import annotations

from collections.abc import Sequence

from etc_agent.migration.memory.contiguous import is_contiguous_in
from etc_agent.migration.memory.lifetimes import default_budget_bytes, lifetimes_of
from etc_agent.migration.schedule import WINDOW, Message, Schedule, aligned, schedules_for
from etc_agent.migration.transport.landing import area_of
from etc_agent.migration.transport.neighbours import pairs_of_hosts
from etc_agent.planner.migration import make_plan
from etc_agent.planner.plan import MigrationPlan
from etc_agent.state.boxes import Box
from etc_agent.state.layout import Manifest

_LARGEST_ROUND_BYTES = 64 << 20
_SMALLEST_PART = 64
"""Rounds smaller than this part of the headroom (budget minus larger state) cost more time than they save memory."""
_MOST_ROUNDS = 512
"""About so many at most, however small the budget."""
_FINER = 0.8
"""From one size of rounds that was tried to the next."""


def plan_release(
    previous: Sequence[Manifest],
    current: Sequence[Manifest],
    budget_bytes: int | Sequence[int | None] | None = None,
    nodes: Sequence[int] | None = None,
) -> MigrationPlan:
    """The plan that turns `previous` into `current`, where entry i of both is worker i's manifest.

    `budget_bytes`: of every worker, or of each; by default its `default_budget_bytes`. The same on every worker. Where
    no rounds fit, the plan has the smallest ones, and `ReleasingMigration.prepare` says who lacks how much. `nodes`:
    as for `make_plan`.

    Raises:
        PlanError: as for `make_plan`.
    """
    allowed = [budget_bytes] * len(previous) if budget_bytes is None or isinstance(budget_bytes, int) else budget_bytes
    budgets, headroom, largest = [], _LARGEST_ROUND_BYTES, 1
    for old, new, budget in zip(previous, current, allowed, strict=True):
        old_bytes, new_bytes = (sum(shard.num_bytes for shard in manifest) for manifest in (old, new))
        sizes = [shard.num_bytes for shard in (*old, *new)]
        budgets.append(budget or default_budget_bytes(old_bytes, new_bytes, sizes))
        headroom = min(headroom, budgets[-1] - max(old_bytes, new_bytes)) if new_bytes else headroom
        largest = max(largest, old_bytes, new_bytes)
    sizes = [min(_LARGEST_ROUND_BYTES, largest)]
    while sizes[-1] * _FINER > max(headroom // _SMALLEST_PART, largest // _MOST_ROUNDS, 1):
        sizes.append(int(sizes[-1] * _FINER))

    def planned(round_bytes: int) -> MigrationPlan:
        return make_plan(previous, current, round_bytes=round_bytes, nodes=nodes)

    def fits(plan: MigrationPlan) -> bool:
        peaks = expected_peaks_bytes(plan, previous, nodes)
        return all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True))

    largest_rounds = planned(sizes[0])
    if fits(largest_rounds):
        return largest_rounds
    # Smaller rounds need less: halve the range of sizes in which the largest that fits must be.
    first, last, found = 1, len(sizes) - 1, None
    while first < last:
        middle = (first + last) // 2
        plan = planned(sizes[middle])
        if fits(plan):
            last, found = middle, plan
        else:
            first = middle + 1
    return found or planned(sizes[-1])


def expected_peaks_bytes(
    plan: MigrationPlan, previous: Sequence[Manifest], nodes: Sequence[int] | None = None
) -> list[int]:
    """Most bytes that each worker holds at once, staging included, if each of its old shards has a storage of its own;
    whether or not the workers of a node share their landing areas. `nodes`: as for `make_plan`."""
    hosts = [f"node {node}" for node in nodes or [0] * plan.num_workers]
    sharing = schedules_for(plan, pairs_of_hosts(plan, hosts))
    peaks = []
    for manifest, alone, together in zip(previous, schedules_for(plan), sharing, strict=True):
        sizes = {shard: shard.num_bytes for shard in manifest}
        held = lifetimes_of(alone, manifest).peak_bytes(sum(sizes.values()), sizes, WINDOW)
        peaks.append(held + max(_staging_bytes(alone), area_of(together).num_bytes + _staging_bytes(together)))
    return peaks


def _staging_bytes(schedule: Schedule) -> int:
    needs = [
        sum(_staged_bytes(m, m.transfers[0].source_box) for m in r.sends)
        + sum(_staged_bytes(m, m.transfers[0].target_box) for m in r.receives)
        for r in schedule.rounds
    ]
    return sum(max(needs[slot::WINDOW], default=0) for slot in range(WINDOW))


def _staged_bytes(message: Message, outer: Box) -> int:
    return 0 if message.shared or _in_place(message, outer) else aligned(message.num_bytes)


def _in_place(message: Message, outer: Box) -> bool:
    return len(message.transfers) == 1 and is_contiguous_in(message.transfers[0].box, outer)
