"""Instructions by rule: what all workers together do is a complete, exact migration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.topology import Node, Topology
from etc_agent.planner.instructions import Instructor
from etc_agent.planner.model_atoms import model_atoms
from etc_agent.planner.placement import place_atoms
from etc_agent.state.boxes import whole
from etc_agent.state.model import ModelDescription, StateKind
from etc_agent.state.sharding import Sharding

MODEL = ModelDescription(
    "m", num_layers=4, hidden=8, num_heads=4, num_kv_heads=2, vocab=13, ffn_hidden=6, vocab_multiple=2, gated=True,
    kinds=(StateKind("model", "bfloat16", 2, sharded=False), StateKind("optimizer.exp_avg", "float32", 4)),
)


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        (MODEL, "PP4TP2", "PP2TP4"), (MODEL, "PP2TP2DP2", "PP4TP1DP3"), (MODEL, "TP4DP2", "PP2TP2DP3"),
        (replace(MODEL, num_kv_heads=1), "TP4", "TP2DP5"), (replace(MODEL, num_experts=4), "TP2DP4EP4", "PP2DP6EP2"),
        (replace(MODEL, tied=True, bias=True, gated=False), "PP4DP2", "PP1TP4DP3"),
    ],
)
def test_all_workers_together_rebuild_every_shard_once(model, before, after):
    cluster = Topology(tuple(Node(name, 4) for name in "abc"))
    previous, current = (Sharding(model, ParallelConfig.parse(text)) for text in (before, after))
    where = cluster.slots[: previous.config.num_ranks]
    sketch = place_atoms(model_atoms(previous, current), cluster.slots, where, cluster)
    instructor = Instructor(previous, current, where, sketch.placement)
    every = [instructor.instructions(worker) for worker in range(instructor.num_workers)]
    sends = sorted(t for one in every for t in map(repr, one.sends))
    assert sends == sorted(t for one in every for t in map(repr, one.receives))
    old, new = previous.layout(), current.layout()
    for worker, one in enumerate(every):
        assert all(t.source == worker for t in one.sends)
        held = {(s.tensor.name, s.box) for s in (old[worker] if worker < len(old) else ())}
        rank = int(instructor.rank_of_worker[worker])
        counts = {(s.tensor.name, s.box): np.zeros(s.tensor.shape, int) for s in (new[rank] if rank >= 0 else ())}
        assert all((t.tensor.name, t.source_box) in held for t in one.sends)
        for item in (*one.refers, *one.receives):
            assert item.box.intersect(item.target_box) == item.box
            assert item.box.intersect(item.source_box) == item.box
            counts[item.tensor.name, item.target_box][item.box.within(whole(item.tensor.shape))] += 1
        for (_, box), count in counts.items():
            assert (count[box.within(whole(count.shape))] == 1).all()
            assert count.sum() == box.num_elements
    moved = sum(t.num_bytes for one in every for t in one.receives)
    assert moved == sketch.moved_bytes


def test_holders_of_one_part_send_equally_much():
    model = replace(MODEL, hidden=64, num_heads=4, ffn_hidden=96)
    cluster = Topology(tuple(Node(f"n{index}", 1) for index in range(12)))
    previous, current = (Sharding(model, ParallelConfig.parse(text)) for text in ("DP4", "DP12"))
    instructor = Instructor(previous, current, cluster.slots[:4], cluster.slots)
    sent = [sum(t.num_bytes for t in instructor.instructions(worker).sends) for worker in range(4)]
    assert max(sent) <= 1.05 * min(sent)
