"""Placement: what is kept, against brute force; and the constraints."""

from __future__ import annotations

import random
from itertools import permutations

import numpy as np
import pytest

from etc_agent.parallel.topology import Node, Slot, Topology
from etc_agent.planner.errors import PlanError
from etc_agent.planner.placing.atoms import atoms_of
from etc_agent.planner.placing.placement import place
from etc_agent.state.boxes import Box
from etc_agent.state.layout import Layout, LogicalTensor, Shard


def grid(num_layers: int, pp: int, tp: int, dp: int = 1) -> Layout:
    """Layers of 12 elements: stage p holds its share of the layers, part t its share of each layer."""
    manifests = []
    for p in range(pp):
        for _ in range(dp):
            for t in range(tp):
                layers = range(num_layers * p // pp, num_layers * (p + 1) // pp)
                box = Box((12 * t // tp,), (12 // tp,))
                manifests.append(tuple(Shard(LogicalTensor(f"layer{k}", (12,), "uint8", 1), box) for k in layers))
    return tuple(manifests)


def topology(*counts: int) -> Topology:
    return Topology(tuple(Node(name, count) for name, count in zip("abcdefgh", counts, strict=False)))


def oracle_cost(previous: Layout, current: Layout) -> np.ndarray:
    """Bytes by counting single elements, with no box algebra."""
    def elements(manifest):
        return {(s.tensor.name, e) for s in manifest for e in range(s.box.offset[0], s.box.offset[0] + s.box.shape[0])}

    have = [elements(manifest) for manifest in previous]
    return np.array([[len(elements(manifest) - held) for held in have] for manifest in current])


@pytest.mark.parametrize("before", [(4, 1), (2, 2), (1, 3), (3, 2, 2)])
@pytest.mark.parametrize("after", [(2, 1), (1, 4), (3, 2), (6, 1), (2, 2, 2)])
def test_the_cost_matrix_counts_every_byte(before, after):
    previous, current = grid(6, *before), grid(6, *after)
    assert (atoms_of(previous, current).cost_matrix() == oracle_cost(previous, current)).all()


def test_boxes_cut_along_several_dims_cost_what_they_lack():
    tensor = LogicalTensor("w", (4, 6), "uint8", 1)
    previous = ((Shard(tensor, Box((0, 0), (4, 3))),), (Shard(tensor, Box((0, 3), (4, 3))),))
    current = ((Shard(tensor, Box((0, 0), (2, 6))), Shard(tensor, Box((2, 0), (1, 1)))),)
    assert atoms_of(previous, current).cost_matrix().tolist() == [[6, 7]]


@pytest.mark.parametrize("seed", range(20))
def test_on_one_node_the_least_bytes_move(seed):
    rng = random.Random(seed)
    before = rng.choice([(4, 1), (2, 2), (1, 3), (3, 1)])
    after = rng.choice([(2, 1), (1, 4), (2, 2), (5, 1)])
    previous, current = grid(12, *before), grid(12, *after)
    slots = topology(5).slots
    where = tuple(rng.sample(slots, len(previous)))
    result = place(current, slots, previous, where, topology(5), group_size=after[1])
    cost = oracle_cost(previous, current)
    need = [sum(s.num_bytes for s in manifest) for manifest in current]
    worker_on = {slot: worker for worker, slot in enumerate(where)}

    def moved(placement):
        return sum(cost[r, worker_on[s]] if s in worker_on else need[r] for r, s in enumerate(placement))

    assert result.moved_bytes == moved(result.placement)
    assert result.moved_bytes == min(moved(order) for order in permutations(slots, len(current)))


def test_without_a_past_ranks_go_to_slots_in_node_order():
    cluster = topology(2, 2)
    assert place(grid(4, 4, 1), cluster.slots, None, None, cluster).placement == cluster.slots


def test_without_a_past_a_tp_group_is_inside_a_node_where_one_fits():
    cluster = topology(3, 3, 2)
    result = place(grid(4, 3, 2), cluster.slots, None, None, cluster, group_size=2)
    assert [slot.node for slot in result.placement] == ["a", "a", "b", "b", "c", "c"]


def test_without_a_past_a_tp_group_wider_than_any_node_takes_neighbours():
    cluster = topology(2, 2)
    assert place(grid(4, 1, 4), cluster.slots, None, None, cluster, group_size=4).placement == cluster.slots


def test_an_unchanged_job_stays_where_it_is():
    cluster = topology(4, 4)
    layout = grid(8, 2, 2, 2)
    where = tuple(reversed(cluster.slots))
    result = place(layout, cluster.slots, layout, where, cluster, group_size=2)
    assert result.placement == where
    assert result.moved_bytes == 0


def test_a_drained_node_takes_no_rank():
    cluster = topology(2, 2, 2)
    previous = grid(8, 4, 1)
    result = place(previous, cluster.slots, previous, cluster.slots[:4], cluster, excluded={"a"})
    assert {slot.node for slot in result.placement} == {"b", "c"}
    assert result.placement[2:] == cluster.slots[2:4]
    assert result.moved_bytes == 48


def test_a_pinned_rank_stays_though_another_slot_would_be_cheaper():
    cluster = topology(2, 2)
    previous = grid(8, 4, 1)
    result = place(grid(8, 2, 1), cluster.slots, previous, cluster.slots[::-1], cluster, pinned={0: Slot("a", 0)})
    assert result.placement[0] == Slot("a", 0)
    assert result.placement[1] in cluster.slots[:2]


def test_pins_into_one_node_tear_only_the_groups_that_cannot_be_there():
    cluster = topology(2, 2)
    result = place(grid(8, 2, 2), cluster.slots, None, None, cluster, group_size=2,
                   pinned={0: Slot("a", 0), 2: Slot("a", 1)})
    assert result.placement[0] == Slot("a", 0)
    assert result.placement[2] == Slot("a", 1)
    assert len(set(result.placement)) == 4


def test_packing_frees_whole_nodes():
    """The paper's Fig. 10: PP16 -> PP8 on eight nodes of four slots, two busy on each."""
    cluster = topology(*[4] * 8)
    where = tuple(slot for slot in cluster.slots if slot.index < 2)
    previous, current = grid(16, 16, 1), grid(16, 8, 1)
    assert place(current, cluster.slots, previous, where, cluster, pack=True).num_nodes == 2
    assert place(current, cluster.slots, previous, where, cluster).moved_bytes == 8 * 12


@pytest.mark.parametrize("tp", [1, 2])
def test_packing_many_nodes_gives_up_replicas_of_every_stage(tp):
    cluster = Topology(tuple(Node(f"n{index:02}", 2) for index in range(16 * tp)))
    result = place(
        grid(8, 2, tp, 14), cluster.slots, grid(8, 2, tp, 16), cluster.slots, cluster, group_size=tp, pack=True
    )
    assert (result.moved_bytes, result.num_nodes) == (0, 14 * tp)


def test_packing_on_uneven_nodes_takes_the_one_move_that_frees_one():
    cluster = topology(4, 4, 4)
    where = (Slot("a", 0), Slot("b", 0), *(Slot("c", index) for index in range(4)))
    layout = grid(6, 6, 1)
    result = place(layout, cluster.slots, layout, where, cluster, pack=True)
    assert result.num_nodes == 2
    assert sum(new != old for new, old in zip(result.placement, where, strict=True)) == 1


def test_too_few_slots_are_refused_with_the_count():
    cluster = topology(2, 1)
    with pytest.raises(PlanError, match=r"4 ranks .* 3 are available \(a: 2, b: 1\)"):
        place(grid(4, 4, 1), cluster.slots, None, None, cluster)
    with pytest.raises(PlanError, match="cannot be pinned"):
        place(grid(4, 2, 1), cluster.slots, None, None, cluster, pinned={0: Slot("a", 7)})


def test_packing_keeps_a_pinned_node():
    cluster = topology(4, 4, 4)
    layout = grid(8, 4, 1)
    where = cluster.slots[:4]
    assert place(layout, cluster.slots, layout, where, cluster, pack=True).placement == where
    kept = place(layout, cluster.slots, layout, where, cluster, pack=True, pinned_nodes={"c"})
    assert {slot.node for slot in kept.placement} == {"c"}
    with pytest.raises(PlanError, match="z cannot be kept"):
        place(layout, cluster.slots, layout, where, cluster, pack=True, pinned_nodes={"z"})


def test_a_lost_node_is_no_source_and_need_not_be_in_the_topology():
    before, cluster = topology(2, 2), topology(2)
    previous = grid(8, 2, 1, 2)
    where = tuple(before.slots[index] for index in (0, 2, 1, 3))
    result = place(grid(8, 2, 1), cluster.slots, (previous[0], (), previous[2], ()), where, cluster)
    assert result.placement == cluster.slots
    assert result.bottleneck_s == 0


def test_state_that_nobody_holds_does_not_hinder_a_placement():
    """The planner of instructions refuses it by name; the placement is decided by what is left."""
    cluster = topology(2, 2)
    previous = ((), *grid(8, 4, 1)[1:])
    result = place(grid(8, 2, 1), cluster.slots, previous, cluster.slots, cluster)
    assert {slot.node for slot in result.placement} == {"a", "b"}
    lost = place(grid(8, 2, 1), cluster.slots, ((),) * 4, cluster.slots, cluster)
    assert lost.bound_s <= lost.bottleneck_s
    empty = ((), ())
    assert len(place(empty, cluster.slots, empty, cluster.slots[:2], cluster).placement) == 2
