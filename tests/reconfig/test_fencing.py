"""A node that is cut off stops its workers before the others go on, and never while only etcd is away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import ELASTIC, started

from etc_agent.reconfig.fencing import Fencing, Isolation, are_in_reach
from etc_agent.reconfig.records import Failure, FailureKind
from etc_agent.simulator.cluster.at_rest import Cluster

LEASES = st.integers(4, 120).map(Fencing)
NEVER = float("inf")


def cut(at_s: float, now_s: float, fencing: Fencing, **others: bool) -> Isolation:
    """What a node knows `now_s` after its last renewal, where nothing has come through since `at_s`. The last word of
    another node was the renewal itself: nobody asks before a renewal is overdue."""
    facts = {"has_others": True, "is_shared": True, **others}
    return Isolation(**facts, lease_left_s=fencing.ttl_s - now_s, unanswered_s=now_s, stalled_s=now_s - at_s)


@given(LEASES, st.floats(0, 1), st.floats(0, 1))
def test_a_node_that_is_cut_off_stops_when_its_lease_is_over_and_not_before(
    fencing: Fencing, fraction: float, before: float
) -> None:
    at_s = fraction * fencing.ttl_s / 3  # later, the next renewal would have come through
    assert cut(at_s, fencing.ttl_s, fencing).must_stop(fencing)
    assert not cut(at_s, fencing.ttl_s * before - 1e-3, fencing).must_stop(fencing)
    assert fencing.ttl_s + fencing.fence_s <= max(fencing.lease_s, 2)


@given(LEASES, st.floats(0, 1e4), st.floats(0, 1e4))
def test_while_only_etcd_is_away_long_steps_and_scripts_without_any_go_on(
    fencing: Fencing, away_s: float, stalled_s: float
) -> None:
    answered = Isolation(True, True, lease_left_s=-away_s, unanswered_s=1.0, stalled_s=stalled_s)
    assert not answered.must_stop(fencing)


def test_steps_that_need_other_nodes_prove_that_there_is_no_cut() -> None:
    fencing = Fencing(10.0)
    training = Isolation(True, True, lease_left_s=-60, unanswered_s=60, stalled_s=0.5)
    assert not training.must_stop(fencing), "an agent whose packets are dropped while the workers' are not"
    alone = Isolation(True, False, lease_left_s=-60, unanswered_s=60, stalled_s=0.5)
    assert alone.must_stop(fencing), "these steps would go on beside those of whoever takes over"


def test_a_node_that_nobody_can_replace_goes_on() -> None:
    alone = Isolation(False, False, lease_left_s=-NEVER, unanswered_s=NEVER, stalled_s=NEVER)
    assert not alone.must_stop(Fencing(10.0))


@pytest.mark.parametrize(
    ("asked", "answered", "expected"),
    [(1, 0, False), (1, 1, True), (2, 0, False), (2, 1, True), (3, 1, False), (3, 2, True), (16, 8, True)],
)
def test_half_of_the_nodes_are_not_the_job(asked: int, answered: int, expected: bool) -> None:
    assert are_in_reach(asked, answered) is expected


# ---- what the leader makes of it -------------------------------------------------------------------------------


def test_the_job_goes_on_only_when_a_lost_node_must_have_stopped_its_workers() -> None:
    cluster = started(ELASTIC, "a", "b")
    cluster.cut_off("a")
    for absent_s in (0.0, 0.9 * ELASTIC.fence_s):
        cluster.absent_s["a"] = absent_s
        cluster.run()
        assert cluster.current.committed == 1
    cluster.absent_s["a"] = ELASTIC.fence_s
    cluster.run()
    assert cluster.committed.nodes == ("b",)
    assert cluster.current.restarts == 0


def test_no_failure_starts_workers_beside_those_of_a_node_that_may_still_have_some() -> None:
    cluster = started(ELASTIC, "a", "b")
    cluster.cut_off("a")
    cluster.fail("b", 0, Failure("b/0", FailureKind.RAISED, 1, "ValueError: at the same time"))
    cluster.run()
    assert cluster.current.committed == 1


def test_a_node_that_stopped_its_workers_and_is_back_before_anybody_noticed_starts_anew_with_the_rest() -> None:
    cluster = started(ELASTIC, "a", "b")
    cluster.cut_off("a")
    cluster.fence("a")
    cluster.come_back("a")
    cluster.run()
    assert cluster.committed.id == 2
    assert set(cluster.committed.nodes) == {"a", "b"}
    assert cluster.current.restarts == 0, "being cut off is not the job's failure"
    cluster.assert_consistent()


def test_a_node_that_comes_back_later_joins_like_any_other() -> None:
    cluster = started(ELASTIC, "a", "b")
    cluster.cut_off("a")
    cluster.absent_s["a"] = ELASTIC.fence_s
    cluster.run()
    cluster.fence("a")
    cluster.come_back("a")
    cluster.run()
    assert set(cluster.committed.nodes) == {"a", "b"}
    cluster.assert_consistent()


def test_a_joiner_that_was_cut_off_withdraws_what_was_prepared_for_it() -> None:
    cluster = started(ELASTIC, "a", is_slow=True)
    cluster.join("b")
    cluster.run()
    proposed = cluster.current.proposed
    assert "b" in cluster.generations[proposed].nodes
    cluster.cut_off("b")
    cluster.fence("b")
    cluster.come_back("b")
    cluster.is_slow = False
    cluster.run()
    assert cluster.history[proposed].outcome == "withdrawn"
    assert set(cluster.committed.nodes) == {"a", "b"}
    assert not cluster.committed.is_fresh, "node a never stopped"
    cluster.assert_consistent()


def test_an_agent_that_takes_over_a_name_starts_nothing_in_a_generation_that_was_there_before_it() -> None:
    cluster: Cluster = started(ELASTIC, "a", "b")
    num_started = cluster.num_started
    cluster.lose("a")
    cluster.join("a")
    cluster._act("a")
    assert cluster.num_started == num_started
    cluster.run()
    assert cluster.committed.is_fresh
    assert set(cluster.committed.nodes) == {"a", "b"}
    cluster.assert_consistent()
