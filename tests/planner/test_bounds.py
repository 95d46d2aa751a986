"""Lower bounds against every assignment."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from etc_agent.planner.placing.bounds import receiving_bound


@given(st.data())
@settings(deadline=None)
def test_no_assignment_beats_the_bound(data):
    kinds, bins = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    times = np.array(data.draw(st.lists(st.integers(0, 9), min_size=kinds * bins, max_size=kinds * bins)), float)
    times = times.reshape(kinds, bins)
    count = np.array(data.draw(st.lists(st.integers(1, 2), min_size=kinds, max_size=kinds)))
    room = np.array(data.draw(st.lists(st.integers(0, 4), min_size=bins, max_size=bins)))
    assume(room.sum() >= count.sum())
    rows = np.repeat(np.arange(kinds), count)
    best = min(
        max(times[rows[np.array(to) == bin_], bin_].sum() for bin_ in range(bins))
        for to in product(range(bins), repeat=len(rows))
        if (np.bincount(to, minlength=bins) <= room).all()
    )
    assert receiving_bound(times, count, room) <= best


def test_nodes_that_must_be_filled_bound_the_time():
    """Two rows for a warm bin with room for one and a cold one: somebody pays for the cold one."""
    times = np.array([[0.0, 5.0], [1.0, 5.0]])
    assert receiving_bound(times, np.array([1, 1]), np.array([1, 2])) == 5.0
    assert receiving_bound(times, np.array([2, 2]), np.array([1, 3])) == 15.0
    assert receiving_bound(times, np.array([1, 1]), np.array([2, 2])) == 1.0
