"""Layouts of whole jobs from few ranks, and their encoding."""

from __future__ import annotations

import json

import pytest

from etc_agent.parallel.config import ParallelConfig
from etc_agent.state.boxes import Box, whole
from etc_agent.state.describing import layout_by_class
from etc_agent.state.encoding import decode_layout, encode_layout
from etc_agent.state.layout import LogicalTensor, Manifest, Shard
from etc_agent.state.model import ModelDescription
from etc_agent.state.sharding import Sharding

MODEL = ModelDescription(
    "m", num_layers=80, hidden=8192, num_heads=64, num_kv_heads=8, vocab=128256, ffn_hidden=28672, gated=True
)


def test_4096_ranks_are_described_from_two_of_each_position_and_take_kilobytes():
    config = ParallelConfig(pp=8, tp=8, dp=64)
    sharding, asked = Sharding(MODEL, config), []

    def manifest_of(rank: int) -> Manifest:
        asked.append(rank)
        return sharding.manifest(rank)

    layout = layout_by_class(config, manifest_of)
    assert len(asked) == 2 * 64
    encoded = encode_layout(layout)
    assert len(json.dumps(encoded)) < 100 << 10
    assert decode_layout(encoded) == layout
    assert all(layout[rank] == sharding.manifest(rank) for rank in range(0, 4096, 97))


def test_where_replicas_hold_different_parts_every_rank_is_asked_for():
    config, tensor = ParallelConfig(pp=2, dp=6), LogicalTensor("w", (12, 3), "float32", 4)

    def manifest_of(rank: int) -> Manifest:
        return (Shard(tensor, Box((2 * (rank % 6), 0), (2, 3))),)

    assert layout_by_class(config, manifest_of) == tuple(map(manifest_of, range(12)))


def test_positions_of_experts_are_positions_of_their_own():
    config = ParallelConfig(dp=4, ep=2)

    def manifest_of(rank: int) -> Manifest:
        return (Shard(LogicalTensor(f"expert{config.expert_part(rank)}", (2,), "float32", 4), whole((2,))),)

    assert layout_by_class(config, manifest_of) == tuple(map(manifest_of, range(4)))


def test_what_is_no_layout_is_refused():
    good = encode_layout(((Shard(LogicalTensor("w", (2,), "float32", 4), whole((2,))),),))
    for bad in ({}, {"packed": 3}, {"packed": "no"}, {"packed": good["packed"][:-8]}):
        with pytest.raises(ValueError, match="not an encoded layout"):
            decode_layout(bad)
