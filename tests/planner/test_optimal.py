"""Placements against brute force: every placement, and for each the best sources."""

from __future__ import annotations

import pytest

from etc_agent.planner.placing.placement import place
from etc_agent.simulator.random_cases import RandomCase, compare_with_brute_force


def test_the_bottleneck_is_that_of_the_best_placement_in_500_random_cases():
    optimal, worst = compare_with_brute_force(500)
    assert optimal >= 0.95
    assert worst <= 1.15


def test_what_a_sketch_says_of_itself_is_true_and_least_bytes_are_least():
    for seed in range(1000, 1120):
        case = RandomCase(seed)
        arguments = (case.current, case.slots, case.previous, case.where, case.topology)
        for least in ("time", "bytes"):
            result = place(*arguments, group_size=case.group_size, least=least)
            assert case.is_legal(result.placement)
            assert result.moved_bytes == case.moved(result.placement)
            assert result.bottleneck_s == pytest.approx(case.seconds(result.placement), rel=1e-3, abs=1e-3)
        assert result.moved_bytes == case.least_bytes(), seed
        if seed < 1050:
            assert result.bound_s <= case.least_seconds() * (1 + 1e-9)
