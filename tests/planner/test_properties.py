"""Random models, configs, clusters and failures through the whole planner: description to executed plan."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.topology import Node, Topology
from etc_agent.planner.errors import MissingSourceError, PlanError
from etc_agent.planner.placing.atoms import atoms_of
from etc_agent.planner.placing.model_atoms import model_atoms
from etc_agent.planner.placing.placement import place, place_atoms  # noqa: F401 (used under other hash seeds)
from etc_agent.planner.transfers.memory import peak_bytes
from etc_agent.planner.transfers.migration import make_plan
from etc_agent.simulator.fabric import execute
from etc_agent.state.model import ModelDescription, StateKind
from etc_agent.state.sharding import Sharding, refusal

KINDS = (StateKind("model", "bfloat16", 2, sharded=False), StateKind("optimizer.exp_avg", "float32", 4))


@st.composite
def models(draw):
    return ModelDescription(
        "random", num_layers=draw(st.integers(1, 5)), hidden=8, num_heads=4,
        num_kv_heads=draw(st.sampled_from([1, 2, 4])), vocab=draw(st.integers(3, 20)),
        ffn_hidden=draw(st.integers(2, 9)),
        vocab_multiple=draw(st.sampled_from([1, 2, 4])), positions=draw(st.sampled_from([0, 3])),
        tied=draw(st.booleans()), norm=draw(st.sampled_from(["rms", "layer", "none"])), bias=draw(st.booleans()),
        gated=draw(st.booleans()), num_experts=draw(st.sampled_from([0, 0, 2, 4])), zero1=draw(st.booleans()),
        kinds=KINDS,
    )


@st.composite
def configs(draw):
    dp = draw(st.integers(1, 3))
    ep = draw(st.sampled_from([n for n in (1, 2) if dp % n == 0]))
    return ParallelConfig(pp=draw(st.integers(1, 3)), tp=draw(st.sampled_from([1, 2, 4])), dp=dp, ep=ep)


@st.composite
def clusters(draw):
    counts = draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    shared = draw(st.booleans())
    return Topology(tuple(
        Node(f"n{index}", count, draw(st.integers(1, 2)), shared_nics=shared) for index, count in enumerate(counts)
    ))


@given(models(), configs(), configs(), clusters(), st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_any_change_is_complete_exact_and_within_its_bounds(model, before, after, cluster, data):
    for config in (before, after):
        if model.num_experts == 0 and config.ep > 1:
            assume(False)
        assume(refusal(model, config) is None)
        assume(config.num_ranks <= len(cluster.slots))
    previous, current = Sharding(model, before), Sharding(model, after)
    where = tuple(data.draw(st.permutations(cluster.slots))[: before.num_ranks])
    layouts = previous.layout(), current.layout()
    sketch = place(layouts[1], cluster.slots, layouts[0], where, cluster, group_size=after.tp,
                   pack=data.draw(st.booleans()))
    assert len(set(sketch.placement)) == after.num_ranks
    groups = [sketch.placement[i : i + after.tp] for i in range(0, after.num_ranks, after.tp)]
    whole_groups = sum(len({slot.node for slot in group}) == 1 for group in groups)
    assert whole_groups >= min(len(groups), sum(node.num_slots // after.tp for node in cluster.nodes))

    slots = list(dict.fromkeys([*where, *sketch.placement]))
    lost = data.draw(st.sets(st.sampled_from(range(before.num_ranks)), max_size=1))
    held = {slot: () if rank in lost else layouts[0][rank] for rank, slot in enumerate(where)}
    wanted = dict(zip(sketch.placement, layouts[1], strict=True))
    old, new = [held.get(slot, ()) for slot in slots], [wanted.get(slot, ()) for slot in slots]
    options = {"round_bytes": data.draw(st.sampled_from([16, 300, 1 << 20])), "forwarding": data.draw(st.booleans())}
    try:
        plan = make_plan(old, new, **options)
    except MissingSourceError as error:
        assert lost
        assert str(error).split(":")[0] in {s.tensor.name for m in layouts[1] for s in m}  # noqa: PT017
        return
    assert plan.digest == make_plan(old, new, **options).digest
    if not lost:
        assert plan.moved_bytes == sketch.moved_bytes
    execute(plan, seed=1)
    counts = [{(s.tensor.name, s.box): np.zeros(s.box.shape, int) for s in m} for m in new]
    for refer in plan.refers:
        counts[refer.worker][refer.tensor.name, refer.target_box][refer.box.within(refer.target_box)] += 1
    for t in (t for transfers in plan.rounds for t in transfers):
        counts[t.target][t.tensor.name, t.target_box][t.box.within(t.target_box)] += 1
    assert all((count == 1).all() for shards in counts for count in shards.values())
    budget = max(peak_bytes(plan, old, new, "release"))
    try:
        bounded = make_plan(old, new, budget_bytes=budget, **options)
    except PlanError:
        return
    assert max(peak_bytes(bounded, old, new, "release")) <= budget


@given(models(), configs(), configs())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_the_quick_atoms_of_a_model_are_those_of_its_layouts(model, before, after):
    assume(refusal(model, before) is None)
    assume(refusal(model, after) is None)
    previous, current = Sharding(model, before), Sharding(model, after)
    listed, quick = atoms_of(previous.layout(), current.layout()), model_atoms(previous, current)
    assert (quick.cost_matrix() == listed.cost_matrix()).all()
    # What several workers hold together, too: on two nodes, the even workers on the one, the odd ones on the other.
    two = np.arange(before.num_ranks) % 2
    held = [(side.current.multiply(side.atom_bytes) @ side.union(two, 2).T).toarray() for side in (listed, quick)]
    assert (held[0] == held[1]).all()


def test_placements_and_plans_are_the_same_under_any_hash_seed():
    code = """
from tests.planner.test_properties import *
model = ModelDescription("m", num_layers=4, hidden=8, num_heads=4, vocab=13, tied=True, kinds=KINDS)
cluster = Topology(tuple(Node(f"n{i}", 3) for i in range(4)))
before, after = (Sharding(model, ParallelConfig.parse(text)) for text in ("PP2TP2DP2", "PP4TP1DP3"))
sketch = place_atoms(model_atoms(before, after), cluster.slots, cluster.slots[:8], cluster)
old, new = before.layout(), after.layout()
plan = make_plan([*old, *[()] * 4], new, nodes=[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], forwarding=True)
print(*map(str, sketch.placement), plan.digest)
"""
    outputs = {
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, text=True,
                       capture_output=True, check=True).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1
