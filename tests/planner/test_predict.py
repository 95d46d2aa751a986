"""The config chooser: what it prefers, what it refuses, and what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.topology import Node, Topology
from etc_agent.planner.choose import NoConfigError
from etc_agent.planner.predict import Device, Training, predict, rank_configs, rank_state_bytes
from etc_agent.state.model import ModelDescription
from etc_agent.state.sharding import Sharding

parse = ParallelConfig.parse
LLAMA = ModelDescription("llama", num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, vocab=128256,
                         ffn_hidden=14336, gated=True, sequence=8192)
TINY = ModelDescription("tiny", num_layers=4, hidden=64, num_heads=4, vocab=100, sequence=64)
CLUSTER = Topology(tuple(Node(f"n{index}", 8, 8) for index in range(4)))


@pytest.mark.parametrize("text", ["PP1", "PP2TP2", "PP4", "TP4DP2", "PP2DP4"])
def test_the_state_of_a_rank_is_what_its_manifest_holds(text):
    layout = Sharding(TINY, parse(text)).layout()
    assert rank_state_bytes(TINY, parse(text)) == max(sum(s.num_bytes for s in m) for m in layout)


def test_what_does_not_fit_memory_is_refused_with_the_numbers():
    choice = rank_configs(LLAMA, 8, CLUSTER)
    reasons = dict(choice.refused)
    assert "GiB per rank, there are 80.0" in reasons[parse("DP8")]
    assert all(prediction.memory_bytes <= 80 << 30 for prediction in choice.ranking)
    assert choice.best.num_ranks == 8


def test_a_small_model_trains_data_parallel():
    assert rank_configs(replace(TINY, sequence=2048), 8, CLUSTER).best == parse("DP8")


def test_tensor_parallelism_across_nodes_is_slow():
    inside, across = (predict(LLAMA, parse(text), CLUSTER, Device(), Training()) for text in ("TP8DP2", "TP16"))
    assert across.tp_s > 5 * inside.tp_s


def test_a_longer_pipeline_has_a_larger_bubble_and_interleaving_a_smaller_one():
    two, four = (predict(LLAMA, parse(text), CLUSTER, Device(), Training()) for text in ("PP2TP4", "PP4TP2"))
    assert four.bubble_s > two.bubble_s
    assert predict(LLAMA, parse("PP4TP2"), CLUSTER, Device(), Training(interleave=2)).bubble_s < four.bubble_s


def test_equal_steps_are_decided_by_the_migration():
    free = rank_configs(TINY, 4, CLUSTER, allowed=[parse("PP2DP2"), parse("DP4")], ranker=lambda p, s: (s,),
                        migration_s=lambda config: float(config.dp))
    assert free.best == parse("PP2DP2")


def test_fewer_slots_are_used_where_the_model_cannot_use_all():
    assert rank_configs(TINY, 7, CLUSTER, training=Training(global_batch=4)).best.num_ranks < 7


def test_the_choice_is_explained_and_so_is_a_refusal():
    assert rank_configs(LLAMA, 8, CLUSTER).explain().startswith("chosen PP")
    with pytest.raises(NoConfigError, match=r"fits 2 slots; .*GiB per rank"):
        rank_configs(LLAMA, 2, CLUSTER, device=Device(memory_bytes=1 << 30))
