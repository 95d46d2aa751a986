"""The paper's figures, and where its method goes wrong (ARCHITECTURE.md, section 9)."""

from __future__ import annotations

import numpy as np
import pytest

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.topology import Node, Slot, Topology
from etc_agent.planner.paper import axis_cost, exact_merge, paper_sketch, printed_merge, solve_sketch
from etc_agent.planner.placing.model_atoms import model_atoms
from etc_agent.planner.placing.placement import place, place_atoms
from etc_agent.state.boxes import Box
from etc_agent.state.layout import LogicalTensor, Shard
from etc_agent.state.model import ModelDescription
from etc_agent.state.sharding import Sharding

parse = ParallelConfig.parse


def layers(num_layers: int, config: str, width: int = 4):
    """Layers of `width` bytes cut by pp and tp only."""
    degrees = parse(config)
    manifests = []
    for rank in range(degrees.num_ranks):
        at = degrees.coordinate(rank)
        mine = range(num_layers * at.pp // degrees.pp, num_layers * (at.pp + 1) // degrees.pp)
        box = Box((width * at.tp // degrees.tp,), (width // degrees.tp,))
        manifests.append(tuple(Shard(LogicalTensor(f"l{k}", (width,), "uint8", 1), box) for k in mine))
    return tuple(manifests)


def test_figure_4_costs_and_sketch():
    cost = axis_cost(16, 4, 2)
    assert cost.tolist() == [[4, 4, 8, 8], [8, 8, 4, 4]]
    assert solve_sketch(cost.astype(float)) == [(0, 0), (1, 2)]


def test_figure_5_matrices_as_drawn():
    pp, tp = axis_cost(24, 4, 6), axis_cost(4, 2, 4)
    assert pp.tolist() == [[0, 4, 4, 4], [2, 2, 4, 4], [4, 0, 4, 4], [4, 4, 0, 4], [4, 4, 2, 2], [4, 4, 4, 0]]
    assert tp.tolist() == [[0, 1], [0, 1], [1, 0], [1, 0]]
    drawn = exact_merge(pp, tp, 4, 1)
    assert drawn[:4].tolist() == [
        [0, 4, 4, 4, 4, 4, 4, 4], [0, 4, 4, 4, 4, 4, 4, 4], [4, 0, 4, 4, 4, 4, 4, 4], [4, 0, 4, 4, 4, 4, 4, 4],
    ]


def test_the_printed_rule_calls_strangers_alike():
    pp, tp = axis_cost(24, 4, 6), axis_cost(4, 2, 4)
    assert printed_merge(pp, tp, 4)[2, 0] == 0
    assert exact_merge(pp, tp, 4, 1)[2, 0] == 4


def test_the_printed_rule_moves_80_or_96_units_where_64_are_enough():
    pp, tp = axis_cost(24, 4, 6), axis_cost(4, 2, 4)
    exact, printed = exact_merge(pp, tp, 4, 1), printed_merge(pp, tp, 4)
    total = exact.shape[0] * 4

    def moved(pairs):
        return total - sum(4 - int(exact[row, column]) for row, column in pairs)

    assert total == 96
    assert moved(solve_sketch(exact.astype(float))) == 64
    least = sum(printed[row, column] for row, column in solve_sketch(printed))
    worst = solve_sketch(printed * 1000 - exact)
    assert sum(printed[row, column] for row, column in worst) == pytest.approx(least)
    assert moved(worst) == 96
    assert 64 < moved(solve_sketch(printed)) <= 96


def test_least_bytes_is_not_least_time():
    """PP4TP1 -> PP2TP3, 4 layers, 3 slots per node: 8 of 12 units must move, with load 4; a plan of 9 has load 3."""
    cluster = Topology((Node("a", 3, nic_bytes_per_s=1.0), Node("b", 3, nic_bytes_per_s=1.0)))
    previous, current = layers(4, "PP4", 3), layers(4, "PP2TP3", 3)
    where = cluster.slots[:4]
    arguments = (current, cluster.slots, previous, where, cluster)
    least_bytes = place(*arguments, least="bytes")
    least_time = place(*arguments, least="time")
    assert (least_bytes.moved_bytes, least_bytes.bottleneck_s) == (8, 4)
    assert (least_time.moved_bytes, least_time.bottleneck_s) == (9, 3)


def test_shrinking_tp_with_packing_frees_a_node_and_keeps_groups_whole():
    """PP3TP4 -> PP3TP3 on three nodes of four: the paper's allocator moves two ranks and frees nothing."""
    cluster = Topology(tuple(Node(name, 4) for name in "abc"))
    previous, current = layers(12, "PP3TP4", 12), layers(12, "PP3TP3", 12)
    result = place(current, cluster.slots, previous, cluster.slots, cluster, group_size=3)
    groups = [result.placement[i : i + 3] for i in range(0, 9, 3)]
    assert all(len({slot.node for slot in group}) == 1 for group in groups)
    assert [group[0].node for group in groups] == ["a", "b", "c"]


def test_dp_isolation_copies_what_other_replicas_have():
    """Table II row 6: 46.1 GB isolated, 15.4 GB with every replica as a source and as a place."""
    model = ModelDescription("etc", num_layers=36, hidden=3072, num_heads=32, vocab=50304, tied=True, norm="layer",
                             bias=True)
    cluster = Topology(tuple(Node(f"n{index}", 4, 4) for index in range(8)))
    before, after = parse("PP4TP2DP3"), parse("PP4TP8")
    table = model_atoms(Sharding(model, before), Sharding(model, after))
    where = cluster.slots[:24]
    paper = paper_sketch(table, 36, before, after, cluster.slots, where, cluster, merge="drawn")
    printed = paper_sketch(table, 36, before, after, cluster.slots, where, cluster)
    ours = place_atoms(table, cluster.slots, where, cluster, least="bytes")
    assert round(paper.moved_bytes / 1e9, 1) == 46.1
    assert printed.moved_bytes > paper.moved_bytes
    assert ours.moved_bytes / 1e9 == pytest.approx(15.4, abs=0.1)
    assert ours.bottleneck_s <= paper.bottleneck_s


def test_a_fused_gate_and_up_projection_is_two_blocks():
    """TP2 rank 0 holds g0-3, u0-3 and TP4 rank 0 needs g0, g1, u0, u1: not the first half of what TP2 holds."""
    model = ModelDescription("m", num_layers=1, hidden=4, num_heads=4, vocab=8, ffn_hidden=8, gated=True)

    def up(config):
        layout = Sharding(model, parse(config)).layout()
        return [s.box for s in layout[0] if s.tensor.name == "model.layers.0.mlp.up"]

    assert up("TP2") == [Box((0, 0), (4, 4)), Box((8, 0), (4, 4))]
    assert up("TP4") == [Box((0, 0), (2, 4)), Box((8, 0), (2, 4))]


def test_zero1_moments_exist_once_so_shrinking_dp_moves_them():
    model = ModelDescription("m", num_layers=2, hidden=8, num_heads=4, vocab=16, zero1=True)
    table = model_atoms(Sharding(model, parse("DP4")), Sharding(model, parse("DP2")))
    kept = np.asarray(table.common_bytes().toarray()).max(axis=1).sum()
    assert table.needed_bytes().sum() > kept
    dense = ModelDescription("m", num_layers=2, hidden=8, num_heads=4, vocab=16)
    assert model_atoms(Sharding(dense, parse("DP4")), Sharding(dense, parse("DP2"))).cost_matrix().max() == 0


def test_a_padded_vocabulary_straddles_owners():
    model = ModelDescription("m", num_layers=1, hidden=4, num_heads=4, vocab=13, vocab_multiple=2)
    rows = [
        [s.box.shape[0] for m in Sharding(model, parse(f"TP{tp}")).layout() for s in m
         if s.tensor.name == "model.embedding.word"]
        for tp in (2, 4)
    ]
    assert rows == [[8, 5], [4, 4, 4, 1]]


def test_one_move_is_enough_on_fills_1_1_4():
    cluster = Topology(tuple(Node(name, 4) for name in "abc"))
    where = (Slot("a", 0), Slot("b", 0), *(Slot("c", index) for index in range(4)))
    layout = layers(6, "PP6")
    result = place(layout, cluster.slots, layout, where, cluster, pack=True)
    assert (result.num_nodes, result.changed_ranks) == (2, 1)
