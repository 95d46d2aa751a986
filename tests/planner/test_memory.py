"""Memory: what plans take, and budgets that hold or are refused up front."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_agent.planner.errors import PlanError
from etc_agent.planner.transfers.memory import peak_bytes
from etc_agent.planner.transfers.migration import make_plan
from etc_agent.simulator.random_cases import layered


def pad(before, after):
    size = max(len(before), len(after))
    return [*before, *[()] * (size - len(before))], [*after, *[()] * (size - len(after))]


def test_keeping_both_states_takes_both_but_shared_shards_once():
    previous, current = pad(layered(4, 2, 1, 1), layered(4, 1, 1, 1))
    plan = make_plan(previous, current)
    assert peak_bytes(plan, previous, current, "keep") == (48, 24)


def test_releasing_takes_less_than_keeping():
    previous, current = pad(layered(12, 1, 2, 1), layered(12, 2, 1, 1))
    plan = make_plan(previous, current, round_bytes=12)
    keep, release = (peak_bytes(plan, previous, current, mode) for mode in ("keep", "release"))
    assert all(less < more for less, more in zip(release, keep, strict=True))
    assert min(release) >= 72


def test_shards_of_local_parts_alone_do_not_keep_old_ones_until_the_end():
    """Halves become quarters: half of what a worker needs is in its own old shards, which it also sends from."""
    previous, current = layered(12, 2, 2, 1), layered(12, 1, 4, 1)
    plan = make_plan(previous, current, round_bytes=6, budget_bytes=36 + 12)
    assert max(peak_bytes(plan, previous, current, "release")) <= 36 + 12
    assert min(peak_bytes(plan, previous, current, "keep")) == 72


@given(
    st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3, 4]), st.integers(1, 2)),
    st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3, 4]), st.integers(1, 2)),
    st.integers(12, 200), st.integers(6, 100),
)
@settings(max_examples=150, deadline=None)
def test_a_budget_is_never_exceeded(before, after, budget, round_bytes):
    previous, current = pad(layered(12, *before), layered(12, *after))
    steady = max(sum(s.num_bytes for s in m) for m in (*previous, *current))
    try:
        plan = make_plan(previous, current, round_bytes=round_bytes, budget_bytes=budget)
    except PlanError as error:
        assert "budget" in str(error)  # noqa: PT017
        free = make_plan(previous, current, round_bytes=round_bytes, budget_bytes=1 << 40)
        assert budget < steady + 24 or max(peak_bytes(free, previous, current, "release")) > budget
        return
    assert max(peak_bytes(plan, previous, current, "release")) <= budget
    assert plan.moved_bytes == make_plan(previous, current).moved_bytes


def test_a_budget_that_cannot_be_met_is_refused_with_both_numbers():
    previous, current = pad(layered(4, 2, 1, 1), layered(4, 1, 1, 1))
    with pytest.raises(PlanError, match="budget of 40 bytes per worker: worker 0 would hold 48"):
        make_plan(previous, current, budget_bytes=40)
    with pytest.raises(PlanError, match="holds 24 bytes of state already, the budget is 20"):
        make_plan(previous, current, budget_bytes=20)
