"""Holders that overlap only in part send about as much as one another."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_agent.planner.transfers.demands import Demand
from etc_agent.planner.transfers.shares import filled, shares
from etc_agent.state.boxes import Box


def demand(start: int, rows: int, holders: set[int]) -> Demand:
    box = Box((start,), (rows,))
    return Demand.of(box, [(box, np.array([99]))], [(box, np.array(sorted(holders)))])


@given(st.integers(0, 1000), st.lists(st.integers(0, 500), min_size=1, max_size=6))
def test_what_is_poured_adds_up_and_lies_level(amount, loads):
    found = filled(amount, loads)
    assert sum(found) == amount
    assert min(found) >= 0
    after = [load + part for load, part in zip(loads, found, strict=True)]
    filled_up = [height for height, part in zip(after, found, strict=True) if part]
    if filled_up:
        assert max(filled_up) - min(after) <= 1


@given(st.lists(st.tuples(st.integers(1, 4000), st.sets(st.integers(0, 4), min_size=1)), min_size=1, max_size=6))
@settings(deadline=None)
def test_the_busiest_sends_hardly_more_than_the_least_possible(boxes):
    """The least possible: the largest average, over any set of holders, of what nobody else holds."""
    demands = [demand(10_000 * number, rows, holders) for number, (rows, holders) in enumerate(boxes)]
    load = np.zeros(5)
    for each, part in zip(demands, shares(demands, [1] * len(demands)), strict=True):
        even = np.full(len(each.holders), each.box.num_elements / len(each.holders))
        assert part is None or part.sum() == each.box.num_elements
        load[each.holders] += even if part is None else part
    sets = [set(chosen) for size in range(1, 6) for chosen in itertools.combinations(range(5), size)]
    least = max(Fraction(sum(rows for rows, holders in boxes if holders <= chosen), len(chosen)) for chosen in sets)
    assert load.max() <= 1.1 * float(least) + 10
