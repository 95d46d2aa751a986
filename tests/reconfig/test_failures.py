"""Failures, losses and refusals: what the leader makes of them."""

from __future__ import annotations

from dataclasses import replace

from jobs import ELASTIC, one_node, started

from etc_agent.parallel.config import ParallelConfig
from etc_agent.reconfig.known.records import Failure, FailureKind, Outcome, Phase, Result
from etc_agent.reconfig.known.view import Policy
from etc_agent.simulator.cluster.at_rest import Cluster


def test_a_lost_node_restarts_the_rest_of_a_job_without_sessions() -> None:
    cluster = started(ELASTIC, "a", "b", hooked=False)
    cluster.lose("a")
    cluster.run()
    assert cluster.committed.nodes == ("b",)
    assert cluster.committed.is_fresh
    assert cluster.current.restarts == 0, "a lost node is not the job's failure"


def test_a_new_leader_waits_one_lease_time_before_it_believes_that_a_node_is_gone() -> None:
    cluster = started(ELASTIC, "a", "b")
    cluster.connected_s = 1.0
    cluster.lose("a")
    cluster.run()
    assert cluster.current.committed == 1
    cluster.connected_s = 1e9
    cluster.run()
    assert cluster.committed.nodes == ("b",)


def test_a_leader_that_cannot_know_yet_does_not_go_on_without_a_node_for_another_reason() -> None:
    cluster = started(ELASTIC, "a", "b", hooked=False)
    cluster.connected_s = 1.0
    cluster.phase_s = 1e9
    cluster.lose("a")
    cluster.run()
    assert cluster.current.committed == 1, "it may still have workers"
    cluster.connected_s = 1e9
    cluster.run()
    assert cluster.committed.nodes == ("b",)


def test_a_migration_that_was_voted_down_leaves_the_job_as_it_was() -> None:
    cluster = one_node()
    cluster.votes_down = "a worker ran out of memory"
    cluster.ask("PP2TP2DP1")
    cluster.run()
    assert cluster.config == "PP2TP1DP1"
    assert not any(ack.failure for ack in cluster.acks.values())
    assert cluster.replies[-1].result is Result.PENDING
    assert "out of memory" in cluster.replies[-1].message
    cluster.assert_consistent()


def in_the_midst_of_a_switch() -> Cluster:
    cluster = one_node()
    cluster.is_switching = True
    cluster.ask("PP2TP2DP1")
    cluster.run()
    assert cluster.current.phase is Phase.ARMED
    return cluster


KILLED = Failure("a/3", FailureKind.KILLED, 137, "pid 7 was killed by SIGKILL")


def test_a_joiner_that_is_killed_in_the_switch_leaves_the_others_training() -> None:
    cluster = in_the_midst_of_a_switch()
    cluster.fail("a", 3, KILLED)
    cluster.run()
    assert cluster.current.phase is Phase.ARMED, "the others say what came of it"
    cluster.stay("Connection closed by peer")
    cluster.run()
    assert (cluster.config, cluster.current.restarts) == ("PP2TP1DP1", 0)
    assert not cluster.committed.previous, "it is still the first generation"
    assert cluster.replies[-1].result is Result.PENDING
    assert cluster.replies[-1].message == (
        "a/3: pid 7 was killed by SIGKILL; it is tried again in 10 s (timeouts.retry_s), 1 of 4 times went wrong"
    )
    cluster.assert_consistent()


def test_a_joiner_that_is_killed_when_there_is_no_way_back_is_a_loss() -> None:
    cluster = in_the_midst_of_a_switch()
    cluster.policy = replace(cluster.policy, max_restarts=1)
    cluster.fail("a", 3, KILLED)
    cluster.fail("a", 0, Failure("a/0", FailureKind.PEER_LOST, 1, "Connection closed by peer"))
    cluster.failed_s = 1e9
    cluster.is_switching = False
    cluster.run()
    assert cluster.history[2].outcome == "withdrawn"
    assert cluster.committed.is_fresh, "the other stage is gone"
    assert "not handled in place: nobody else holds w of PP2TP1DP1" in cluster.committed.reason


def test_a_joiner_that_is_killed_while_the_others_never_answer_is_a_restart() -> None:
    cluster = in_the_midst_of_a_switch()
    cluster.policy = replace(cluster.policy, max_restarts=1)
    cluster.fail("a", 3, KILLED)
    cluster.phase_s = 1e9
    cluster.run()
    assert cluster.committed.id == 3
    assert cluster.committed.is_fresh


def test_a_restart_does_not_ask_dead_workers_about_the_model() -> None:
    cluster = started(ELASTIC, "a", "b")
    cluster.descriptions.clear()
    lost = Failure("b/0", FailureKind.PEER_LOST, 1, "Connection closed by peer")
    cluster.fail("b", 0, lost)
    cluster.fail("b", 1, lost)
    cluster.lose("a")
    cluster.lead()
    assert cluster.committed.is_fresh
    assert cluster.descriptions == {}


def test_below_the_smallest_number_the_job_waits_then_fails() -> None:
    cluster = started(Policy(2, 2, num_slots=2), "a", "b", hooked=False)
    cluster.is_quiet = False
    cluster.lose("a")
    cluster.run()
    assert cluster.current.outcome is Outcome.RUNNING
    cluster.is_quiet = True
    cluster.run()
    assert cluster.current.outcome is Outcome.FAILED
    assert "nnodes wants at least 2" in cluster.current.why


def test_a_raising_worker_uses_up_the_restart_budget_then_ends_the_job_with_its_exit_code() -> None:
    cluster = Cluster(Policy(1, 1, num_slots=2, max_restarts=1))
    cluster.join("a")
    cluster.run()
    bug = Failure("a/1", FailureKind.RAISED, 3, "ValueError: bad")
    cluster.fail("a", 1, bug)
    cluster.run()
    assert cluster.committed.id == 2
    assert cluster.committed.is_fresh
    assert cluster.current.restarts == 1
    cluster.fail("a", 1, bug)
    cluster.run()
    assert cluster.current.outcome is Outcome.FAILED
    assert cluster.current.exit_code == 3
    assert "ValueError: bad" in cluster.current.why


def crash(cluster: Cluster, error: str) -> None:
    cluster.fail("a", 1, Failure("a/1", FailureKind.RAISED, 3, error))
    cluster.run()


def test_a_job_that_fails_alike_before_its_first_step_stops_early_and_says_why() -> None:
    cluster = started(Policy(1, 1, num_slots=2, max_restarts=100), "a")
    for pid in (101, 102):
        crash(cluster, f"pid {pid}: no such file: data.bin")
    assert cluster.current.restarts == 2
    crash(cluster, "pid 103: no such file: data.bin")
    assert cluster.current.outcome is Outcome.FAILED
    assert cluster.current.exit_code == 3
    assert "3 times alike before the first step" in cluster.current.why


def test_failures_that_differ_or_come_after_a_step_use_the_budget_alone() -> None:
    cluster = started(Policy(1, 1, num_slots=2, max_restarts=8), "a")
    for error in ("one", "one", "two", "one"):
        crash(cluster, error)
    cluster.progress("a")
    crash(cluster, "one")
    for error in ("one", "one"):
        crash(cluster, error)
    assert cluster.current.restarts == 7
    assert cluster.current.outcome is Outcome.RUNNING


def test_a_script_without_a_session_that_lived_for_long_is_no_crash_loop() -> None:
    cluster = started(Policy(1, 1, num_slots=2, max_restarts=8), "a", hooked=False)
    cluster.phase_s = 121.0
    for _ in range(4):
        crash(cluster, "one")
    assert cluster.current.restarts == 4
    cluster.phase_s = 5.0
    for _ in range(3):
        crash(cluster, "one")
    assert cluster.current.outcome is Outcome.FAILED


def test_the_cause_is_named_and_not_the_peer_that_noticed() -> None:
    cluster = started(Policy(1, 1, num_slots=2), "a")
    cluster.fail("a", 0, Failure("a/0", FailureKind.PEER_LOST, 1, "Connection reset by peer"))
    cluster.fail("a", 1, Failure("a/1", FailureKind.KILLED, 137, "killed by SIGKILL"))
    cluster.run()
    assert cluster.current.exit_code == 137
    assert "SIGKILL" in cluster.current.why


def test_a_rank_that_left_early_is_named_and_not_the_peer_that_needed_it() -> None:
    cluster = started(Policy(1, 1, num_slots=2), "a")
    cluster.workers["a"][1] = replace(cluster.workers["a"][1], exit_code=0, has_closed=True)
    cluster.fail("a", 0, Failure("a/0", FailureKind.PEER_LOST, 1, "Connection reset by peer"))
    cluster.failed_s = 1e9
    cluster.run()
    assert cluster.current.exit_code == 1
    assert cluster.current.why.startswith("the worker on a/1 failed: it ended with exit code 0 while the others still")


def test_a_lost_peer_waits_for_the_lease_of_a_dead_node() -> None:
    cluster = started(ELASTIC, "a", "b", hooked=False)
    cluster.fail("b", 0, Failure("b/0", FailureKind.PEER_LOST, 1, "Connection reset by peer"))
    cluster.run()
    assert cluster.current.outcome is Outcome.RUNNING
    assert cluster.current.committed == 1
    cluster.failed_s = 1e9
    cluster.run()
    assert cluster.current.outcome is Outcome.FAILED


def test_a_lost_peer_waits_for_the_one_that_raised() -> None:
    cluster = started(Policy(1, 1, num_slots=2), "a")
    cluster.fail("a", 0, Failure("a/0", FailureKind.PEER_LOST, 1, "Connection reset by peer"))
    cluster.run()
    assert cluster.current.outcome is Outcome.RUNNING
    cluster.fail("a", 1, Failure("a/1", FailureKind.RAISED, 1, "ValueError: the cause"))
    cluster.run()
    assert "ValueError: the cause" in cluster.current.why


def test_a_worker_that_refuses_withdraws_the_generation() -> None:
    cluster = one_node()
    cluster.refusing = "out of memory"
    cluster.ask("4")
    cluster.run()
    assert cluster.config == "PP2TP1DP1"
    assert cluster.replies[-1].result is Result.PENDING
    assert "out of memory" in cluster.replies[-1].message
    assert cluster.history[2].outcome == "withdrawn"
    cluster.assert_consistent()


def test_a_refused_growth_is_not_tried_for_ever() -> None:
    cluster = started(ELASTIC, "a")
    cluster.refusing = "no"
    cluster.join("b")
    cluster.run()
    assert cluster.config == "PP1TP1DP2"


def test_a_generation_that_is_not_ready_in_time_is_withdrawn() -> None:
    cluster = one_node()
    cluster.is_slow = True
    cluster.ask("PP2TP2DP1")
    cluster.run()
    assert cluster.current.phase is Phase.PROPOSED
    cluster.phase_s = 1e9
    cluster.lead()
    assert cluster.current.phase is Phase.IDLE
    assert "timeouts.prepare_s" in cluster.replies[-1].message


def test_a_model_that_refuses_the_first_config_is_started_with_another() -> None:
    cluster = Cluster(Policy(1, 1, num_slots=3), refuses={"PP1TP1DP3": "4 samples cannot be divided over dp=3"})
    cluster.join("a", num_slots=3)
    cluster.run()
    assert cluster.config != "PP1TP1DP3"
    assert cluster.current.outcome is Outcome.RUNNING
    assert cluster.current.restarts == 0
    cluster.assert_consistent()


def test_a_model_that_refuses_the_config_that_was_asked_for_ends_the_job_with_its_reason() -> None:
    policy = Policy(1, 1, num_slots=4, initial=ParallelConfig(tp=3))
    cluster = Cluster(policy, refuses={"PP1TP3DP1": "4 heads over tp=3"})
    cluster.join("a", num_slots=4)
    cluster.run()
    assert cluster.current.outcome is Outcome.FAILED
    assert cluster.current.why == "4 heads over tp=3"


def test_after_a_loss_a_config_that_the_model_refuses_costs_no_restart() -> None:
    refuses = {"PP1TP1DP3": "no", "PP3TP1DP1": "no", "PP1TP3DP1": "no"}
    cluster = Cluster(Policy(1, 2, num_slots=3), refuses=refuses)
    cluster.join("a", num_slots=3)
    cluster.join("b", num_slots=3)
    cluster.run()
    cluster.descriptions.clear()
    cluster.lose("b")
    cluster.run()
    assert cluster.committed.config.num_ranks == 2
    assert cluster.current.restarts == 0


def test_a_request_that_a_loss_puts_off_is_pending_again() -> None:
    cluster = started(ELASTIC, "a")
    cluster.join("b")
    cluster.run()
    cluster.is_slow = True
    cluster.ask("3")
    cluster.run()
    cluster.lose("b")
    cluster.run()
    assert cluster.replies[-1].result is Result.PENDING
    cluster.is_slow = False
    cluster.catch_up()
    cluster.join("c")
    cluster.run()
    assert cluster.replies[-1].result is Result.DONE
    assert cluster.committed.config.num_ranks == 3


def hung(slot: str, kind: FailureKind, at: float = 5.0) -> Failure:
    return Failure(slot, kind, 1, f"{kind} in step {at:g}", at)


def test_of_workers_that_hang_the_cause_is_named_once_every_node_has_looked() -> None:
    cluster = started(Policy(1, 2, num_slots=2), "a", "b", hooked=False)
    cluster.fail("a", 0, hung("a/0", FailureKind.WAITING))
    cluster.fail("a", 1, hung("a/1", FailureKind.WAITING))
    cluster.run()
    assert cluster.current.outcome is Outcome.RUNNING, "node b has yet to say what its workers do"
    cluster.fail("b", 0, hung("b/0", FailureKind.HUNG, at=5.0))
    cluster.fail("b", 1, hung("b/1", FailureKind.HUNG, at=4.0))
    cluster.run()
    assert cluster.current.outcome is Outcome.RUNNING, "stacks are still being written"
    cluster.failed_s = 6.0
    cluster.run()
    assert cluster.current.outcome is Outcome.FAILED
    assert cluster.current.exit_code == 1
    assert cluster.current.why == "the worker on b/1, rank 3, hung in step 4", "of two, the one behind"


def test_a_worker_that_does_not_answer_is_the_likelier_cause() -> None:
    cluster = started(Policy(1, 1, num_slots=2, max_restarts=1), "a", hooked=False)
    cluster.failed_s = 6.0
    cluster.fail("a", 0, hung("a/0", FailureKind.HUNG, at=4.0))
    cluster.fail("a", 1, hung("a/1", FailureKind.UNRESPONSIVE))
    cluster.run()
    assert cluster.committed.reason == "restart 1 of 1: the worker on a/1, rank 1, unresponsive in step 5"


def test_a_hang_that_is_over_is_forgotten() -> None:
    cluster = started(Policy(1, 1, num_slots=2), "a")
    before = dict(cluster.workers["a"])
    cluster.fail("a", 0, hung("a/0", FailureKind.HUNG))
    cluster.run()
    cluster.workers["a"] = before
    cluster.run()
    cluster.failed_s = 60.0
    cluster.run()
    assert cluster.current.outcome is Outcome.RUNNING
    assert cluster.committed.id == 1
