"""Parallel configs: how they are written and how they number ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_agent.parallel.config import Coordinate, ParallelConfig

degree = st.integers(1, 5)


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("PP4TP2DP2", ParallelConfig(pp=4, tp=2, dp=2)),
        (" dp2pp4 ", ParallelConfig(pp=4, dp=2)),
        ("TP8", ParallelConfig(tp=8)),
        ("PP2DP4EP2CP2", ParallelConfig(pp=2, dp=4, ep=2, cp=2)),
    ],
)
def test_configs_are_read_in_any_order_and_case(text, config):
    assert ParallelConfig.parse(text) == config
    assert ParallelConfig.parse(str(config)) == config


@pytest.mark.parametrize("text", ["", "4", "PP", "PP0", "PP2PP2", "PP2,TP2", "XP2", "PP2TP-1", "DP3EP2"])
def test_what_is_not_a_config_is_refused(text):
    with pytest.raises(ValueError, match=r"not a parallel config|positive integer|does not divide"):
        ParallelConfig.parse(text)


def test_rare_axes_are_written_only_when_used():
    assert str(ParallelConfig(pp=2)) == "PP2TP1DP1"
    assert str(ParallelConfig(pp=2, dp=2, ep=2)) == "PP2TP1DP2EP2"


@given(degree, degree, degree, degree)
@settings(deadline=None)
def test_ranks_and_coordinates_are_inverse(pp, tp, dp, cp):
    config = ParallelConfig(pp=pp, tp=tp, dp=dp, cp=cp)
    assert [config.rank(config.coordinate(rank)) for rank in range(config.num_ranks)] == list(range(config.num_ranks))


def test_tp_is_fastest_then_dp_then_pp():
    config = ParallelConfig.parse("PP2TP2DP2")
    assert config.coordinate(1) == Coordinate(pp=0, dp=0, tp=1)
    assert config.coordinate(2) == Coordinate(pp=0, dp=1, tp=0)
    assert config.coordinate(4) == Coordinate(pp=1, dp=0, tp=0)


def test_experts_are_shared_by_neighbours_along_dp():
    config = ParallelConfig.parse("TP2DP4EP2")
    assert [config.expert_part(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
