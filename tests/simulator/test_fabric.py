"""Plans on a simulated fabric: they finish whoever is fast, and forwarding spreads the sending."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.topology import Node, Topology
from etc_agent.planner.errors import PlanError
from etc_agent.planner.transfers.memory import peak_bytes
from etc_agent.planner.transfers.migration import make_plan
from etc_agent.planner.transfers.plan import MigrationPlan, Transfer
from etc_agent.simulator.fabric import DeadlockError, execute, seconds
from etc_agent.simulator.random_cases import layered
from etc_agent.simulator.stages import one_hop_and_two_stage_bytes
from etc_agent.state.boxes import Box, whole
from etc_agent.state.layout import LogicalTensor, Shard
from etc_agent.state.model import ModelDescription
from etc_agent.state.sharding import Sharding

degrees = st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3, 4]), st.integers(1, 3))


def pad(before, after):
    size = max(len(before), len(after))
    return [*before, *[()] * (size - len(before))], [*after, *[()] * (size - len(after))]


@given(degrees, degrees, st.integers(6, 60), st.integers(1, 6), st.booleans(), st.integers(0, 99), st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_plan_finishes_with_every_byte_in_its_place(
    before, after, round_bytes, round_transfers, forwarding, seed, budgeted
):
    previous, current = pad(layered(12, *before), layered(12, *after))
    plan = make_plan(previous, current, round_bytes=round_bytes, round_transfers=round_transfers,
                     forwarding=forwarding, budget_bytes=1 << 30 if budgeted else None)
    done = execute(plan, seed=seed)
    assert sorted(map(repr, done)) == sorted(repr(t) for transfers in plan.rounds for t in transfers)
    old = [{(s.tensor.name, s.box): True for s in m} for m in previous]
    filled = [{(s.tensor.name, s.box): np.zeros(s.tensor.shape, int) for s in m} for m in current]
    for refer in plan.refers:
        filled[refer.worker][refer.tensor.name, refer.target_box][refer.box.within(whole(refer.tensor.shape))] += 1
    for transfers in plan.rounds:
        for t in transfers:  # what is sent was there before the round
            place = t.box.within(whole(t.tensor.shape))
            if t.forwarded:
                assert (filled[t.source][t.tensor.name, t.source_box][place] == 1).all()
            else:
                assert (t.tensor.name, t.source_box) in old[t.source]
        for t in transfers:
            filled[t.target][t.tensor.name, t.target_box][t.box.within(whole(t.tensor.shape))] += 1
    for shards in filled:
        for (_, box), counts in shards.items():
            assert (counts[box.within(whole(counts.shape))] == 1).all()
            assert counts.sum() == box.num_elements
    assert max(peak_bytes(plan, previous, current, "release")) <= 1 << 30


def big(num_replicas):
    tensor = LogicalTensor("w", (64, 1 << 18), "float32", 4)
    return tuple((Shard(tensor, whole(tensor.shape)),) for _ in range(num_replicas))


def test_growing_dp_with_forwarding_sends_about_one_copy_per_worker():
    previous, current = pad(big(1), big(8))
    sent = []
    for forwarding in (False, True):
        plan = make_plan(previous, current, forwarding=forwarding, round_bytes=8 << 20)
        totals = [sum(t.num_bytes for r in plan.rounds for t in r if t.source == w) for w in range(8)]
        sent.append(max(totals) / (64 << 20))
        assert plan.moved_bytes == 7 * (64 << 20)
    assert sent[0] == 7
    assert sent[1] <= 1.3


def test_growing_dp_with_forwarding_takes_less_time_on_the_ports():
    cluster = Topology(tuple(Node(f"n{index}", 1) for index in range(8)))
    previous, current = pad(big(1), big(8))
    plain, forwarded = (
        seconds(make_plan(previous, current, forwarding=forwarding, round_bytes=2 << 20), cluster.slots, cluster)
        for forwarding in (False, True)
    )
    assert forwarded < plain / 2


def test_a_cycle_of_waits_is_found():
    tensor = LogicalTensor("w", (2,), "uint8", 1)
    a, b = (Transfer(s, 1 - s, tensor, Box((s,), (1,)), Box((s,), (1,)), whole((2,))) for s in (0, 1))
    assert len(execute(MigrationPlan(2, (), ((a, b),), ""))) == 2
    other = Transfer(0, 1, tensor, Box((1,), (1,)), Box((0,), (1,)), whole((2,)))
    assert len(execute(MigrationPlan(2, (), ((a,), (b,), (other,)), ""))) == 3


def test_workers_that_disagree_are_found():
    """Each worker has its own idea of the rounds; only a shared plan matches."""
    tensor = LogicalTensor("w", (2,), "uint8", 1)
    a = Transfer(0, 1, tensor, Box((0,), (1,)), Box((0,), (1,)), whole((2,)))

    class Lopsided(Transfer):
        """Equal to nothing."""

        def __eq__(self, other):
            return False

        __hash__ = None

    odd = Lopsided(a.source, a.target, a.tensor, a.box, a.source_box, a.target_box)
    with pytest.raises(DeadlockError):
        execute(MigrationPlan(2, (), ((odd,),), ""))


def test_one_hop_moves_less_than_two_stages():
    """The case of Fig. 9 that changes both pp and tp."""
    model = ModelDescription("m", num_layers=48, hidden=3072, num_heads=32, vocab=50304, tied=True)
    cluster = Topology(tuple(Node(f"n{index}", 8, 8) for index in range(4)))
    before, after = (Sharding(model, ParallelConfig.parse(text)) for text in ("PP4TP2", "PP6TP4"))
    one, two = one_hop_and_two_stage_bytes(before, after, cluster.slots[:8], cluster)
    assert one < two


def test_a_budget_and_forwarding_go_together_or_are_refused():
    previous, current = pad(big(1), big(4))
    plan = make_plan(previous, current, forwarding=True, budget_bytes=64 << 20)
    assert max(peak_bytes(plan, previous, current, "release")) <= 64 << 20
    with pytest.raises(PlanError, match="budget"):
        make_plan(previous, current, forwarding=True, budget_bytes=32 << 20)
