"""Below the smallest number of nodes a job keeps its state in memory, and trains on when nodes come."""

from __future__ import annotations

import pytest
from jobs import started

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.records import Failure, FailureKind, Outcome, Result
from etc_agent.reconfig.known.view import Policy
from etc_agent.simulator.cluster.at_rest import Cluster

AT_LEAST_TWO = Policy(2, 3, num_slots=2, max_restarts=3)


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


def test_a_held_job_trains_on_even_where_its_config_stays_the_same() -> None:
    cluster = started(Policy(2, 2, num_slots=2, initial=ParallelConfig(tp=2)), "a", "b")
    cluster.drain("a")
    cluster.run()
    before = cluster.committed
    assert before.is_held
    cluster.join("c")
    cluster.run()
    assert not cluster.committed.is_held
    assert (cluster.config, cluster.committed.previous) == ("PP1TP2DP1", before.id)


def test_a_request_is_not_done_while_the_job_is_held() -> None:
    cluster = held()
    cluster.ask(cluster.config)
    cluster.run()
    assert cluster.replies[-1].result is Result.PENDING
    cluster.join("c")
    cluster.run()
    assert not cluster.committed.is_held
    assert [reply.result for reply in cluster.replies].count(Result.DONE) == 1


def test_a_worker_that_fails_while_the_job_is_held_is_no_restart_once_there_are_enough_nodes() -> None:
    cluster = held()
    cluster.is_quiet = False
    cluster.fail("a", 0, Failure("a/0", FailureKind.KILLED, 137, "killed by SIGKILL"))
    cluster.run()
    assert cluster.committed.is_held, "a recovery below the smallest number would train"
    cluster.join("c")
    cluster.run()
    assert not cluster.committed.is_fresh
    assert not cluster.committed.is_held
    assert cluster.current.restarts == 0


def test_workers_that_cannot_hand_over_are_not_started_anew_below_the_smallest_number() -> None:
    cluster = started(AT_LEAST_TWO, "a", "b")
    cluster.refusing = "out of memory"
    cluster.drain("b")
    cluster.run()
    assert cluster.current.outcome is Outcome.STOPPED


def test_workers_that_refuse_to_train_on_are_not_asked_without_end() -> None:
    cluster = held()
    cluster.refusing = "out of memory"
    cluster.join("c")
    cluster.run()
    assert cluster.committed.is_held
    assert cluster.current.next_id < 20, "each config once"
    cluster.refusing, cluster.phase_s = "", 60.0
    cluster.run()
    assert not cluster.committed.is_held


@pytest.mark.parametrize("hooked", [True, False])
def test_a_job_whose_own_nodes_are_all_there_trains_on_without_the_others(hooked: bool) -> None:
    cluster = started(Policy(2, 2, num_slots=2, initial=ParallelConfig(tp=2)), "a", "b", hooked=hooked)
    cluster.lose("b")
    cluster.phase_s = 1e9
    cluster.run()
    assert cluster.current.committed == 1


def test_a_job_whose_state_does_not_fit_on_the_rest_stops() -> None:
    cluster = started(Policy(2, 2, num_slots=2, allowed=(ParallelConfig(tp=4),)), "a", "b")
    cluster.drain("b")
    cluster.run()
    assert cluster.current.outcome is Outcome.STOPPED
    assert "the rest is too small" in cluster.current.why


def test_a_fresh_generation_has_nothing_to_hold() -> None:
    with pytest.raises(ValueError, match="no state"):
        Generation(1, ParallelConfig(), (Slot("a", 0),), "a:1", previous=0, is_held=True)


def test_a_generation_is_what_its_record_says() -> None:
    generation = Generation(2, ParallelConfig(), (Slot("a", 0),), "a:1", previous=1, is_held=True)
    assert Generation.from_json(generation.to_json()) == generation
