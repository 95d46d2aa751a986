"""A plan for `release` mode: the largest rounds with which every worker stays inside its budget."""

from __future__ import annotations

from collections.abc import Sequence

from etc_agent.migration.contiguous import is_contiguous_in
from etc_agent.migration.lifetimes import default_budget_bytes, lifetimes_of
from etc_agent.migration.schedule import WINDOW, Message, Schedule, aligned, schedule_for
from etc_agent.planner.migration import make_plan
from etc_agent.planner.plan import MigrationPlan
from etc_agent.state.boxes import Box
from etc_agent.state.layout import Manifest

_LARGEST_ROUND_BYTES = 64 << 20
_SMALLEST_PART = 64
"""Rounds of less than this part of what a budget has on top cost more time than they save memory."""
_FINER = 0.8
"""From one size of rounds that was tried to the next."""


def plan_release(
    previous: Sequence[Manifest],
    current: Sequence[Manifest],
    budget_bytes: int | None = None,
    nodes: Sequence[int] | None = None,
) -> MigrationPlan:
    """The plan that turns `previous` into `current`, where entry i of both is worker i's manifest.

    `budget_bytes`: of every worker; by default each has its `default_budget_bytes`. The same on every worker. Where no
    rounds fit, the plan has the smallest ones, and `ReleasingMigration.prepare` says who lacks how much. `nodes`: as
    for `make_plan`.

    Raises:
        PlanError: as for `make_plan`.
    """
    budgets, slack, largest = [], _LARGEST_ROUND_BYTES, 1
    for old, new in zip(previous, current, strict=True):
        old_bytes, new_bytes = (sum(shard.num_bytes for shard in manifest) for manifest in (old, new))
        sizes = [shard.num_bytes for shard in (*old, *new)]
        budgets.append(budget_bytes or default_budget_bytes(old_bytes, new_bytes, sizes))
        slack = min(slack, budgets[-1] - max(old_bytes, new_bytes)) if new_bytes else slack
        largest = max(largest, old_bytes, new_bytes)
    round_bytes, smallest_bytes = min(_LARGEST_ROUND_BYTES, largest), max(1, slack // _SMALLEST_PART)
    while True:
        plan = make_plan(previous, current, round_bytes=round_bytes, nodes=nodes)
        round_bytes = int(round_bytes * _FINER)
        if round_bytes <= smallest_bytes or all(
            expected_peak_bytes(plan, worker, previous[worker]) <= budget for worker, budget in enumerate(budgets)
        ):
            return plan


def expected_peak_bytes(plan: MigrationPlan, worker: int, previous: Manifest) -> int:
    """Most bytes that a worker holds at once, staging included, if each of its old shards has a storage of its own."""
    schedule = schedule_for(plan, worker)
    sizes = {shard: shard.num_bytes for shard in previous}
    held = lifetimes_of(schedule, previous).peak_bytes(sum(sizes.values()), sizes, WINDOW)
    return held + _staging_bytes(schedule)


def _staging_bytes(schedule: Schedule) -> int:
    needs = [
        sum(aligned(m.num_bytes) for m in r.sends if not _in_place(m, m.transfers[0].source_box))
        + sum(aligned(m.num_bytes) for m in r.receives if not _in_place(m, m.transfers[0].target_box))
        for r in schedule.rounds
    ]
    return sum(max(needs[slot::WINDOW], default=0) for slot in range(WINDOW))


def _in_place(message: Message, outer: Box) -> bool:
    return len(message.transfers) == 1 and is_contiguous_in(message.transfers[0].box, outer)
