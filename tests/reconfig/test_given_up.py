"""What the job could not change to: why, for how long it is left alone, and what is said about it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import ELASTIC, one_node, started

from etc_agent.control.causes import ErrorKind
from etc_agent.control.messages import Prepare, Refused
from etc_agent.parallel.config import ParallelConfig
from etc_agent.reconfig.known.records import Current, Failure, FailureKind, Outcome, Phase, Result
from etc_agent.reconfig.known.view import Policy, Wait
from etc_agent.reconfig.leader import decide
from etc_agent.simulator.cluster.at_rest import Cluster

KILLED = Failure("a/3", FailureKind.KILLED, 137, "pid 7 was killed by SIGKILL")


def asked(text: str, **options: object) -> Cluster:
    """A job on one node that is asked for `text`, in the midst of preparing for it."""
    cluster = one_node()
    cluster.is_slow = True
    cluster.ask(text)
    cluster.run()
    assert cluster.current.phase is Phase.PROPOSED
    return cluster


def refuse(cluster: Cluster, index: int, error: str, kind: ErrorKind, node: str = "a") -> None:
    worker, generation = cluster.workers[node][index], cluster.current.proposed
    refused = {**worker.refused, generation: Refused(generation, error, kind)}
    cluster.workers[node][index] = replace(worker, refused=refused)


def last(cluster: Cluster) -> tuple[Result, str]:
    return cluster.replies[-1].result, cluster.replies[-1].message


def test_what_went_wrong_once_is_tried_again_after_a_pause_and_meets_the_request() -> None:
    cluster = asked("4")
    cluster.fail("a", 3, KILLED)
    cluster.run()
    why = f"{KILLED.slot}: {KILLED.error}; it is tried again in 10 s (timeouts.retry_s), 1 of 4 times went wrong"
    assert last(cluster) == (Result.PENDING, why)
    assert cluster.history[2].why == why
    assert decide(cluster.view()) == Wait(10.0)
    cluster.is_slow = False
    cluster.phase_s = 10.0
    cluster.run()
    assert cluster.committed.config.num_ranks == 4
    assert last(cluster)[0] is Result.DONE
    assert cluster.current.given_up == ()


def test_the_same_request_made_again_is_tried_at_once() -> None:
    cluster = asked("4")
    cluster.fail("a", 3, KILLED)
    cluster.is_slow = False
    cluster.run()
    cluster.ask("4")
    cluster.run()
    assert cluster.committed.config.num_ranks == 4
    assert last(cluster)[0] is Result.DONE


def test_a_config_that_goes_wrong_again_and_again_is_given_up_with_its_reason_and_another_is_tried() -> None:
    cluster = one_node()
    cluster.refusing = "RuntimeError: no memory"
    cluster.ask("PP2TP2DP1")
    pauses = []
    for _ in range(4):
        cluster.run()
        decision = decide(cluster.view())
        assert isinstance(decision, Wait)
        cluster.phase_s = decision.seconds
        cluster.lead()
        cluster.phase_s = 0.0
        pauses.append(decision.seconds)
    assert pauses[:3] == [10.0, 20.0, 40.0]
    result, message = last(cluster)
    assert result is Result.REFUSED
    assert message.startswith("PP2TP2DP1 was tried 4 times in vain, the last time: a/0: RuntimeError: no memory")
    assert (cluster.config, cluster.current.wanted) == ("PP2TP1DP1", "PP2TP1DP1")
    cluster.refusing = ""
    cluster.ask("PP2TP2DP1")
    cluster.run()
    assert cluster.config == "PP2TP2DP1"


def test_what_the_model_refuses_is_not_tried_again_and_another_config_of_that_size_is() -> None:
    cluster = asked("4")
    proposed = cluster.generations[cluster.current.proposed].config
    refuse(cluster, 0, f"{proposed}: no", ErrorKind.MODEL)
    cluster.is_slow = False
    cluster.run()
    assert cluster.committed.config.num_ranks == 4
    assert cluster.committed.config != proposed
    assert last(cluster)[0] is Result.DONE
    assert [given_up.config for given_up in cluster.current.given_up] == [str(proposed)]


def test_a_config_that_the_model_refuses_late_is_answered_with_its_reason() -> None:
    cluster = asked("PP2TP2DP1")
    refuse(cluster, 0, "PP2TP2DP1: the vocabulary is odd", ErrorKind.MODEL)
    cluster.run()
    assert last(cluster) == (Result.REFUSED, "PP2TP2DP1: the vocabulary is odd")


@pytest.mark.parametrize("kind", [ErrorKind.MODEL, ErrorKind.RAISED])
def test_the_cause_is_answered_and_not_what_followed_from_it(kind: ErrorKind) -> None:
    cluster = asked("PP2TP2DP1")
    cluster.refused_s = 0.0
    for index in (0, 1, 3):
        refuse(cluster, index, "Connection closed by peer", ErrorKind.PEER_LOST)
    cluster.run()
    assert cluster.current.phase is Phase.PROPOSED, "whoever was lost may yet say why"
    refuse(cluster, 2, "4 heads", kind)
    cluster.run()
    assert "4 heads" in last(cluster)[1]
    assert "Connection" not in last(cluster)[1]


def test_a_lost_peer_that_nobody_explains_is_answered_after_a_while() -> None:
    cluster = asked("PP2TP2DP1")
    cluster.refused_s = cluster.policy.blame_s
    refuse(cluster, 0, "Connection closed by peer", ErrorKind.PEER_LOST)
    cluster.run()
    assert last(cluster)[0] is Result.PENDING
    assert last(cluster)[1].startswith("a/0: Connection closed by peer; it is tried again")


def test_what_is_given_up_because_of_a_node_ends_with_that_node() -> None:
    cluster = started(ELASTIC, "a")
    cluster.is_slow = True
    cluster.join("b")
    cluster.run()
    refuse(cluster, 0, "RuntimeError: its disk is full", ErrorKind.RAISED, node="b")
    cluster.run()
    assert (cluster.config, cluster.current.proposed) == ("PP1TP1DP2", 0)
    cluster.lose("b")
    cluster.is_slow = False
    cluster.run()
    cluster.join("b")
    cluster.run()
    assert cluster.committed.config.num_ranks == 4, "at once: this is another life of node b"


def growing() -> Cluster:
    """Node b is joining a job on node a, in the midst of the switch."""
    cluster = started(ELASTIC, "a")
    cluster.is_switching = True
    cluster.join("b")
    cluster.run()
    assert cluster.current.phase is Phase.ARMED
    return cluster


def test_a_node_that_is_lost_while_it_joins_is_no_fault_of_the_config_and_no_restart() -> None:
    cluster = growing()
    cluster.refused_s = 0.0
    cluster.stay("Connection closed by peer")
    cluster.run()
    assert cluster.current.phase is Phase.ARMED, "node b may yet say why"
    cluster.lose("b")
    cluster.run()
    assert (cluster.config, cluster.committed.id, cluster.current.given_up) == ("PP1TP1DP2", 1, ())
    assert cluster.history[2].why == "node b was lost while it joined"
    cluster.is_switching = False
    cluster.join("c")
    cluster.run()
    assert cluster.committed.config.num_ranks == 4


def test_a_peer_that_was_lost_without_a_word_is_answered_once_its_node_would_be_known_to_be_gone() -> None:
    cluster = growing()
    cluster.stay("Connection closed by peer")
    cluster.refused_s = cluster.policy.lost_s
    cluster.run()
    assert cluster.history[2].why.startswith("a/0: Connection closed by peer; it is tried again in 10 s")
    assert cluster.current.given_up[0].instance == ""


def test_a_growth_that_went_wrong_is_tried_again_without_a_request() -> None:
    cluster = started(ELASTIC, "a")
    cluster.refusing = "RuntimeError: no memory"
    cluster.join("b")
    cluster.run()
    assert cluster.config == "PP1TP1DP2"
    assert len(cluster.history) == 2, "not one config after the other"
    cluster.refusing = ""
    cluster.phase_s = 10.0
    cluster.run()
    assert cluster.committed.config.num_ranks == 4


def test_a_new_leader_knows_what_was_given_up() -> None:
    cluster = asked("4")
    cluster.fail("a", 3, KILLED)
    cluster.run()
    assert Current.from_json(cluster.current.to_json()) == cluster.current
    assert cluster.current.given_up


def test_a_fresh_start_forgets_what_went_wrong_in_a_change() -> None:
    cluster = asked("4")
    cluster.policy = replace(cluster.policy, max_restarts=1)
    cluster.fail("a", 3, KILLED)
    cluster.is_slow = False
    cluster.run()
    cluster.fail("a", 0, Failure("a/0", FailureKind.RAISED, 1, "a bug"))
    cluster.run()
    assert cluster.committed.is_fresh
    assert cluster.committed.config.num_ranks == 4


def test_an_answer_is_put_off_while_no_worker_can_say_the_layout() -> None:
    cluster = one_node()
    cluster.undescribed[ParallelConfig(tp=2, pp=2)] = "MemoryError"
    cluster.ask("PP2TP2DP1")
    cluster.run()
    assert last(cluster)[0] is Result.PENDING
    assert "no worker can say its layout: MemoryError" in last(cluster)[1]
    cluster.undescribed.clear()
    cluster.run()
    assert last(cluster)[0] is Result.DONE


def test_a_node_that_leaves_does_not_wait_for_a_layout_that_no_worker_can_say() -> None:
    cluster = started(ELASTIC, "a", "b")
    cluster.undescribed[ParallelConfig(dp=2)] = "MemoryError"
    cluster.drain("b")
    cluster.run()
    assert cluster.committed.nodes == ("a",)
    assert not cluster.committed.is_fresh


# ---- the config to start with ---------------------------------------------------------------------------------------


def of_24_samples(num_slots: int) -> dict[str, str]:
    """What a model of 24 samples says that has neither tp nor pp of 5."""
    reasons = {}
    for size in range(1, num_slots + 1):
        if 24 % size:
            reasons[f"PP1TP1DP{size}"] = f"PP1TP1DP{size}: a global batch of 24 cannot be divided over dp={size}"
            reasons[f"PP1TP{size}DP1"] = f"PP1TP{size}DP1: 4 heads cannot be divided over tp={size}"
            reasons[f"PP{size}TP1DP1"] = f"PP{size}TP1DP1: 4 layers cannot fill {size} stages"
    return reasons


def test_a_config_that_the_model_refuses_costs_one_start_and_the_others_one_question_each() -> None:
    cluster = Cluster(Policy(1, 1, num_slots=5), refuses=of_24_samples(5))
    cluster.join("a", num_slots=5)
    cluster.run()
    assert (cluster.config, cluster.committed.id) == ("PP1TP1DP4", 2)
    foreseen = "PP1TP1DP3"
    assert set(map(str, cluster.descriptions)) == {"PP1TP5DP1", "PP5TP1DP1", "PP1TP1DP4", foreseen}
    assert cluster.committed.reason == (
        "the model refuses the config before: PP1TP1DP5: a global batch of 24 cannot be divided over dp=5"
    )
    cluster.assert_consistent()


def test_a_size_that_the_model_refuses_in_every_config_is_answered_with_the_reasons() -> None:
    cluster = Cluster(Policy(1, 1, num_slots=5), refuses=of_24_samples(5))
    cluster.join("a", num_slots=5)
    cluster.run()
    cluster.ask("5")
    cluster.run()
    assert last(cluster) == (
        Result.REFUSED,
        "no parallel config has exactly 5 workers; "
        "PP1TP1DP5: a global batch of 24 cannot be divided over dp=5; "
        "PP5TP1DP1: 4 layers cannot fill 5 stages; PP1TP5DP1: 4 heads cannot be divided over tp=5",
    )


def test_what_the_job_file_tells_is_not_tried_at_all() -> None:
    def refuse(config: ParallelConfig) -> str | None:
        return f"{config}: 24 samples" if 24 % config.dp else None

    cluster = Cluster(Policy(1, 1, num_slots=5, refuse=refuse), refuses=of_24_samples(5))
    cluster.join("a", num_slots=5)
    cluster.run()
    assert cluster.generations[1].config == ParallelConfig(tp=5)


def test_a_refusing_worker_is_asked_once_all_are_there_and_not_for_ever() -> None:
    cluster = Cluster(Policy(1, 1, num_slots=5), refuses=of_24_samples(5))
    cluster.join("a", num_slots=5)
    cluster.lead()
    cluster._act("a")
    cluster.workers["a"][4] = replace(cluster.workers["a"][4], in_session=False, refused={})
    cluster.run()
    assert cluster.current.committed == 1, "one worker is still starting"
    assert cluster.descriptions == {}
    cluster.phase_s = cluster.policy.start_s
    cluster.run()
    assert cluster.config == "PP1TP1DP4"


def test_a_job_whose_every_config_is_refused_ends_with_the_reasons() -> None:
    cluster = Cluster(Policy(1, 1, num_slots=1), refuses={"PP1TP1DP1": "PP1TP1DP1: there is no data"})
    cluster.join("a", num_slots=1)
    cluster.run()
    assert cluster.current.outcome is Outcome.FAILED
    assert "there is no data" in cluster.current.why


# ---- a restart on the way -------------------------------------------------------------------------------------------


def test_a_request_that_is_met_by_a_restart_on_the_way_says_so_and_from_which_step() -> None:
    cluster = asked("4")
    cluster.policy = replace(cluster.policy, max_restarts=1)
    cluster.checkpoint = 7
    cluster.is_slow = False
    cluster.fail("a", 0, Failure("a/0", FailureKind.RAISED, 1, "a bug"))
    cluster.run()
    assert last(cluster) == (
        Result.RESTARTED,
        "the job runs as PP2TP1DP2, but all workers were restarted on the way, from step 7: "
        "restart 1 of 1: the worker on a/0 failed: a bug",
    )


def test_a_size_is_not_called_reached_before_the_workers_are_there() -> None:
    cluster = asked("4")
    cluster.policy = replace(cluster.policy, max_restarts=1)
    cluster.hooked = False
    cluster.fail("a", 0, Failure("a/0", FailureKind.RAISED, 1, "a bug"))
    cluster.run()
    assert cluster.committed.is_fresh
    assert not last(cluster)[0].is_final
    for index, worker in cluster.workers["a"].items():
        cluster.workers["a"][index] = replace(worker, in_session=True)
    cluster.run()
    assert last(cluster)[0] is Result.RESTARTED


def test_a_request_before_the_start_is_no_restart() -> None:
    cluster = Cluster(Policy(1, 1, num_slots=4))
    cluster.ask("2")
    cluster.run()
    cluster.join("a", num_slots=4)
    cluster.run()
    assert last(cluster)[0] is Result.DONE


def test_a_generation_that_nobody_prepared_in_time_is_tried_again() -> None:
    cluster = asked("PP2TP2DP1")
    cluster.phase_s = cluster.policy.prepare_s
    assert any(message == (Prepare.type, 2) for message in cluster.workers["a"][0].told)
    cluster.lead()
    assert last(cluster)[0] is Result.PENDING
    assert "node a was not ready within 300 s (timeouts.prepare_s); it is tried again in 10 s" in last(cluster)[1]
