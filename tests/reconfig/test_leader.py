"""The life of a job's generations, decision by decision."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import ELASTIC, ONE_NODE, one_node, started

from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.records import Outcome, Phase, Result
from etc_agent.reconfig.known.view import Policy
from etc_agent.reconfig.leader import decide
from etc_agent.simulator.cluster.at_rest import Cluster


def test_a_job_starts_with_its_initial_config_on_the_first_slots() -> None:
    cluster = one_node()
    assert cluster.config == "PP2TP1DP1"
    assert cluster.committed.placement == (Slot("a", 0), Slot("a", 1))
    assert cluster.committed.is_fresh
    cluster.assert_consistent()


def test_a_job_waits_for_its_smallest_number_of_nodes() -> None:
    cluster = started(Policy(2, 2, num_slots=2), "a")
    assert cluster.current.committed == 0
    cluster.join("b")
    cluster.run()
    assert cluster.committed.nodes == ("a", "b")


def test_a_job_waits_for_more_nodes_until_it_is_quiet() -> None:
    cluster = Cluster(ELASTIC, is_quiet=False)
    cluster.join("a")
    cluster.run()
    assert cluster.current.committed == 0
    cluster.is_quiet = True
    cluster.run()
    assert cluster.config == "PP1TP1DP2"


@pytest.mark.parametrize("text", ["PP2TP2DP1", "pp2tp2", '{"config": "TP2PP2"}'])
def test_a_config_that_is_asked_for_is_reached_in_place(text: str) -> None:
    cluster = one_node()
    before = set(cluster.committed.placement)
    cluster.ask(text)
    cluster.run()
    assert cluster.config == "PP2TP2DP1"
    assert not cluster.committed.is_fresh
    assert before < set(cluster.committed.placement)
    assert [reply.result for reply in cluster.replies] == [Result.ACCEPTED, Result.DONE]
    assert cluster.num_started == 4
    history = cluster.history[cluster.committed.id]
    assert (history.kept, history.started, history.stopped, history.stop_ms) == (2, 2, 0, 5.0)
    cluster.assert_consistent()


def test_rank_0_stays_on_its_process() -> None:
    cluster = one_node()
    for text in ("PP2TP2DP1", "PP1TP2DP2", "PP2TP1DP1", "PP1TP1DP4"):
        cluster.ask(text)
        cluster.run()
        assert cluster.config == text
        assert cluster.committed.placement[0] == Slot("a", 0)
        cluster.assert_consistent()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("many", "'many' is not a size"),
        ("0", "'0' is not a size"),
        ("PP2TP2DP2", "PP2TP2DP2 needs 8 workers, but nnodes admits at most 4"),
        ("8", "8 workers are asked for, but nnodes admits at most 4"),
        ("nodes=2", "2 nodes are asked for, but nnodes admits at most 1"),
        ("PP1TP3DP1", "PP1TP3DP1: 4 heads cannot be divided"),
        ('{"config": 3}', "is not a size"),
        ("[1]", "is not a size"),
        ("9" * 5000, "is not a size"),
        ("{" + '"a":{' * 50_000, "is not a size"),
        ("\u00b2", "is not a size"),
        ("PP2TP2DP1 please", "is not a size"),
    ],
)
def test_a_request_that_cannot_be_met_changes_nothing_and_says_why(text: str, why: str) -> None:
    cluster = one_node()
    cluster.refuses["PP1TP3DP1"] = "4 heads cannot be divided over tp=3"
    before = cluster.current
    cluster.ask(text)
    cluster.run()
    (reply,) = cluster.replies
    assert reply.result is Result.REFUSED
    assert why in reply.message
    assert reply.message.count("\n") == 0
    assert (cluster.current.committed, cluster.current.wanted) == (before.committed, before.wanted)


def test_a_number_of_workers_that_no_config_has_is_refused() -> None:
    cluster = one_node()
    for config in ("PP1TP3DP1", "PP3TP1DP1", "PP1TP1DP3"):
        cluster.refuses[config] = "no"
    cluster.ask("3")
    cluster.run()
    assert cluster.replies[-1].result is Result.REFUSED
    assert "exactly 3 workers" in cluster.replies[-1].message


def test_a_request_for_more_than_is_present_is_pending_and_met_when_nodes_come() -> None:
    cluster = started(ELASTIC, "a")
    cluster.ask("4")
    cluster.run()
    assert cluster.replies[-1].result is Result.PENDING
    assert cluster.config == "PP1TP1DP2"
    cluster.join("b")
    cluster.run()
    assert cluster.committed.config.num_ranks == 4
    assert cluster.replies[-1].result is Result.DONE
    cluster.join("c")
    cluster.run()
    assert cluster.committed.config.num_ranks == 4, "beyond the wanted size a node is a spare"


def test_nodes_that_come_grow_a_job_without_a_wanted_size() -> None:
    cluster = started(ELASTIC, "a")
    cluster.join("b")
    cluster.join("c")
    cluster.run()
    assert cluster.committed.config.num_ranks == 6
    assert cluster.current.committed == 2, "two joiners make one new generation"


def test_a_fourth_node_is_a_spare() -> None:
    cluster = started(ELASTIC, "a", "b", "c", "d")
    assert cluster.committed.nodes == ("a", "b", "c")


def test_a_draining_node_hands_over_and_the_job_goes_on() -> None:
    cluster = started(ELASTIC, "a", "b")
    cluster.drain("a")
    cluster.run()
    assert cluster.committed.nodes == ("b",)
    assert not cluster.committed.is_fresh
    cluster.assert_consistent()


def test_a_node_that_must_leave_is_left_even_if_its_state_cannot_be_handed_over() -> None:
    cluster = started(ELASTIC, "a", "b")
    cluster.refusing = "out of memory"
    cluster.drain("a")
    cluster.run()
    assert cluster.committed.nodes == ("b",)
    assert cluster.committed.is_fresh


def test_when_every_node_drains_the_job_stops() -> None:
    cluster = started(ELASTIC, "a", "b")
    cluster.drain("a")
    cluster.drain("b")
    cluster.run()
    assert cluster.current.outcome is Outcome.STOPPED
    assert cluster.running() == set()


def test_a_drain_withdraws_a_generation_that_needs_the_node() -> None:
    cluster = started(ELASTIC, "a")
    cluster.is_slow = True
    cluster.join("b")
    cluster.run()
    assert cluster.current.phase is Phase.PROPOSED
    cluster.is_slow = False
    cluster.drain("b")
    cluster.run()
    assert cluster.committed.nodes == ("a",)
    assert cluster.current.proposed == 0
    cluster.assert_consistent()


def test_a_request_during_a_change_waits_and_the_last_one_wins() -> None:
    cluster = one_node()
    cluster.is_slow = True
    cluster.ask("PP2TP2DP1")
    cluster.run()
    cluster.ask("PP1TP2DP2")
    cluster.ask("PP1TP1DP4")
    cluster.run()
    assert cluster.current.proposed == 2
    cluster.is_slow = False
    cluster.catch_up()
    cluster.run()
    assert cluster.config == "PP1TP1DP4"
    assert [reply.request for reply in cluster.replies if reply.result is Result.DONE] == ["PP2TP2DP1", "PP1TP1DP4"]


def test_a_pause_keeps_requests_waiting() -> None:
    cluster = one_node()
    cluster.paused = True
    cluster.ask("4")
    cluster.run()
    assert cluster.replies == []
    cluster.paused = False
    cluster.run()
    assert cluster.committed.config.num_ranks == 4


def test_a_script_without_a_session_is_restarted_for_another_size() -> None:
    cluster = Cluster(ONE_NODE, hooked=False)
    cluster.join("a", num_slots=4)
    cluster.run()
    cluster.ask("PP2TP2DP1")
    cluster.run()
    assert cluster.current.committed == 1, "it may still be starting"
    cluster.phase_s = 1e9
    cluster.run()
    assert cluster.config == "PP2TP2DP1"
    assert cluster.committed.is_fresh


def test_a_script_that_says_that_it_has_no_session_is_restarted_at_once() -> None:
    cluster = Cluster(ONE_NODE, hooked=False)
    cluster.join("a", num_slots=4)
    cluster.run()
    cluster.workers["a"][0] = replace(cluster.workers["a"][0], is_plain=True)
    cluster.ask("PP2TP2DP1")
    cluster.run()
    assert cluster.config == "PP2TP2DP1"
    assert cluster.committed.is_fresh


def test_when_every_worker_has_finished_the_job_has_succeeded() -> None:
    cluster = started(ELASTIC, "a", "b")
    cluster.finish()
    cluster.run()
    assert cluster.current.outcome is Outcome.SUCCEEDED


def test_a_job_that_finishes_during_a_change_has_succeeded() -> None:
    cluster = one_node()
    cluster.is_slow = True
    cluster.ask("PP2TP2DP1")
    cluster.run()
    cluster.finish()
    cluster.run()
    assert cluster.current.outcome is Outcome.SUCCEEDED
    assert cluster.running() == set()


def test_nodes_of_unequal_slots_are_filled() -> None:
    cluster = Cluster(Policy(1, 2, num_slots=4))
    cluster.join("a", num_slots=1)
    cluster.join("b", num_slots=3)
    cluster.run()
    assert cluster.committed.config.num_ranks == 4


def test_a_job_that_lacks_nodes_at_its_start_says_so_and_ends_in_time() -> None:
    cluster = started(Policy(2, 2, num_slots=1), "a")
    assert "1 of at least 2 nodes" in decide(cluster.view()).why  # type: ignore[union-attr]
    cluster.phase_s = 1e9
    cluster.run()
    assert cluster.current.outcome is Outcome.FAILED
    assert "timeouts.join_s" in cluster.current.why


def test_a_request_that_is_met_by_a_restart_is_answered() -> None:
    cluster = Cluster(ONE_NODE, hooked=False)
    cluster.join("a", num_slots=4)
    cluster.run()
    cluster.ask("4")
    cluster.run()
    cluster.phase_s = 1e9
    cluster.run()
    assert cluster.replies[-1].result is Result.DONE
    assert cluster.history[2].reason == "asked for 4"


def test_the_end_of_the_job_answers_an_open_request() -> None:
    cluster = one_node()
    cluster.is_slow = True
    cluster.ask("4")
    cluster.run()
    cluster.finish()
    cluster.run()
    assert cluster.replies[-1].result is Result.REFUSED
    assert "the job succeeded" in cluster.replies[-1].message
