"""Choosing a config for a number of slots."""

from __future__ import annotations

import pytest

from etc_agent.parallel.config import ParallelConfig
from etc_agent.planner.choose import NoConfigError, choose_config, every_config

parse = ParallelConfig.parse


def accept(config):
    return None


def test_every_split_of_a_size_is_considered_once():
    configs = every_config(12)
    assert len(configs) == len(set(configs)) == 18
    assert all(config.num_ranks == 12 for config in configs)


def test_the_current_tensor_and_pipeline_degrees_are_kept_where_possible():
    assert choose_config(8, None, parse("PP2TP2"), feasible=accept) == parse("PP2TP2DP2")
    assert choose_config(6, None, parse("PP2TP2"), feasible=accept).tp == 2


def test_context_and_expert_degrees_are_kept_as_far_as_they_divide():
    assert choose_config(2, None, parse("DP4EP4"), feasible=accept) == parse("DP2EP2")
    assert choose_config(3, None, parse("DP4EP4"), feasible=accept) == parse("DP3")
    assert choose_config(8, None, parse("TP2DP1CP2"), feasible=accept) == parse("TP2DP2CP2")
    assert choose_config(4, None, parse("DP2EP2CP2"), feasible=lambda c: "no" if c.cp > 1 else None) == parse("DP4")
    allowed = [parse("DP4EP4"), parse("DP4EP2"), parse("DP4")]
    assert choose_config(4, allowed, parse("DP2EP2"), feasible=accept) == parse("DP4EP2")


def test_a_new_job_prefers_data_parallelism():
    assert choose_config(6, None, None, feasible=accept) == parse("DP6")


def test_only_allowed_configs_that_fit_are_taken_the_largest_first():
    allowed = [parse("PP2"), parse("PP2TP2"), parse("PP4TP2")]
    assert choose_config(7, allowed, parse("PP4TP2"), feasible=accept) == parse("PP2TP2")


def test_slots_are_left_free_when_the_model_cannot_use_them():
    def even_only(config):
        return None if config.num_ranks % 2 == 0 else "the batch is not divisible"

    assert choose_config(5, None, None, feasible=even_only).num_ranks == 4


def test_a_refusal_says_what_was_tried_and_why():
    with pytest.raises(NoConfigError, match=r"PP1TP1DP2: no; .*1 allowed configs need more slots"):
        choose_config(2, [parse("DP2"), parse("DP4")], None, feasible=lambda config: "no")
