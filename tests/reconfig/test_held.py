"""Below the smallest number of nodes a job keeps its state in memory, and trains on when nodes come."""

from __future__ import annotations

from cluster import Cluster
from jobs import started

from etc_agent.reconfig.records import Outcome, Result
from etc_agent.reconfig.view import Policy

AT_LEAST_TWO = Policy(2, 3, num_slots=2)


def held() -> Cluster:
    cluster = started(AT_LEAST_TWO, "a", "b")
    cluster.drain("b")
    cluster.run()
    return cluster


def test_a_leave_below_the_smallest_number_keeps_the_state_on_the_rest() -> None:
    cluster = held()
    assert cluster.current.outcome is Outcome.RUNNING
    assert cluster.committed.is_held
    assert cluster.committed.nodes == ("a",)
    assert not cluster.committed.is_fresh
    cluster.assert_consistent()


def test_a_node_that_comes_lets_the_job_train_on() -> None:
    cluster = held()
    cluster.join("c")
    cluster.run()
    assert not cluster.committed.is_held
    assert cluster.committed.nodes == ("a", "c")
    assert not cluster.committed.is_fresh
    assert cluster.num_started == 6


def test_a_held_job_ends_with_a_word_when_nobody_comes() -> None:
    cluster = held()
    cluster.phase_s = 1e9
    cluster.run()
    assert cluster.current.outcome is Outcome.FAILED
    assert cluster.current.exit_code == 1
    assert "1 of at least 2 nodes (--nnodes) are here, and no more came" in cluster.current.why


def test_a_request_to_a_held_job_waits_for_nodes() -> None:
    cluster = held()
    cluster.ask("3")
    cluster.run()
    assert cluster.replies[-1].result is Result.PENDING
    cluster.join("c")
    cluster.run()
    assert cluster.replies[-1].result is Result.DONE
    assert cluster.committed.config.num_ranks == 3
    assert not cluster.committed.is_held


def test_a_held_job_moves_on_when_its_node_must_leave_too() -> None:
    cluster = started(Policy(3, 3, num_slots=2), "a", "b", "c")
    for name in ("c", "b"):
        cluster.drain(name)
        cluster.run()
    assert cluster.committed.is_held
    assert cluster.committed.nodes == ("a",)
    cluster.drain("a")
    cluster.run()
    assert cluster.current.outcome is Outcome.STOPPED


def test_a_script_without_a_session_is_stopped_as_before() -> None:
    cluster = started(AT_LEAST_TWO, "a", "b", hooked=False)
    cluster.drain("b")
    cluster.run()
    assert cluster.current.outcome is Outcome.STOPPED
