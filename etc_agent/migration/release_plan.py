"""Rounds for `release` mode: the largest with which every worker stays inside its budget.

Smaller rounds need less memory beside the state. The sizes that are tried are equal on every worker; each finds the
largest that it has room for, and the smallest of these counts (`own_plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from etc_agent.migration.memory.contiguous import is_contiguous_in
from etc_agent.migration.memory.lifetimes import default_budget_bytes, lifetimes_of
from etc_agent.migration.schedule import WINDOW, Message, Schedule, aligned, schedule_for
from etc_agent.migration.transport.landing import area_of
from etc_agent.migration.transport.neighbours import pairs_of_hosts
from etc_agent.planner.transfers.migration import make_plan
from etc_agent.planner.transfers.plan import MigrationPlan
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
    """The complete plan that turns `previous` into `current`, where entry i of both is worker i's manifest.

    `budget_bytes`: of every worker, or of each; by default its `default_budget_bytes`. `nodes`: as for `make_plan`. For
    tests and tools: a session's workers derive the same in parts (`own_plan.plan_to_release`).

    Raises:
        PlanError: as for `make_plan`.
    """
    allowed = [budget_bytes] * len(previous) if budget_bytes is None or isinstance(budget_bytes, int) else budget_bytes
    budgets = [budget_for(*each) for each in zip(previous, current, allowed, strict=True)]
    each_one = [headroom_of(*each) for each in zip(previous, current, budgets, strict=True)]
    sizes = round_sizes(min(headroom for headroom, _ in each_one), max(largest for _, largest in each_one))
    plans: dict[int, MigrationPlan] = {}

    def planned(round_bytes: int) -> MigrationPlan:
        if round_bytes not in plans:
            plans[round_bytes] = make_plan(previous, current, round_bytes=round_bytes, nodes=nodes)
        return plans[round_bytes]

    def fits_on(worker: int) -> Callable[[int], bool]:
        return lambda round_bytes: (
            expected_peak_bytes(planned(round_bytes), worker, previous[worker], nodes) <= budgets[worker]
        )

    return planned(sizes[max((largest_that_fits(sizes, fits_on(w)) for w in range(len(previous))), default=0)])


def budget_for(old: Manifest, new: Manifest, budget_bytes: int | None) -> int:
    """A worker's budget: what it was given, or the default."""
    old_bytes, new_bytes = _num_bytes(old), _num_bytes(new)
    return budget_bytes or default_budget_bytes(old_bytes, new_bytes, [shard.num_bytes for shard in (*old, *new)])


def headroom_of(old: Manifest, new: Manifest, budget_bytes: int) -> tuple[int, int]:
    """What the sizes of rounds depend on: the budget minus the larger state, and the larger state."""
    old_bytes, new_bytes = _num_bytes(old), _num_bytes(new)
    largest = max(old_bytes, new_bytes, 1)
    return (min(_LARGEST_ROUND_BYTES, budget_bytes - largest) if new_bytes else _LARGEST_ROUND_BYTES), largest


def round_sizes(headroom_bytes: int, largest_bytes: int) -> list[int]:
    """The sizes of rounds to try, the largest first. Arguments: the least `headroom_of` all workers, and the largest
    state."""
    sizes = [min(_LARGEST_ROUND_BYTES, largest_bytes)]
    while sizes[-1] * _FINER > max(headroom_bytes // _SMALLEST_PART, largest_bytes // _MOST_ROUNDS, 1):
        sizes.append(int(sizes[-1] * _FINER))
    return sizes


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The index of the largest size that fits, or of the smallest one where none does."""
    if fits(sizes[0]):
        return 0
    first, last = 1, len(sizes) - 1
    while first < last:
        middle = (first + last) // 2
        if fits(sizes[middle]):
            last = middle
        else:
            first = middle + 1
    return last


def expected_peak_bytes(
    plan: MigrationPlan, worker: int, held: Manifest, nodes: Sequence[int] | None = None
) -> int:
    """Most bytes that `worker` holds at once, staging included, if each of its old shards (`held`) has a storage of its
    own; whether or not the workers of a node share their landing areas. `nodes`: as for `make_plan`."""
    hosts = [f"node {node}" for node in nodes or [0] * plan.num_workers]
    alone = schedule_for(plan, worker)
    together = schedule_for(plan, worker, pairs_of_hosts(plan, hosts))
    sizes = {shard: shard.num_bytes for shard in held}
    state = lifetimes_of(alone, held).peak_bytes(sum(sizes.values()), sizes, WINDOW)
    return state + max(_staging_bytes(alone), area_of(together).num_bytes + _staging_bytes(together))


def expected_peaks_bytes(
    plan: MigrationPlan, previous: Sequence[Manifest], nodes: Sequence[int] | None = None
) -> list[int]:
    """The same of every worker, from a complete plan."""
    return [expected_peak_bytes(plan, worker, held, nodes) for worker, held in enumerate(previous)]


def _num_bytes(manifest: Manifest) -> int:
    return sum(shard.num_bytes for shard in manifest)


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
