"""A worker or a node is lost: the survivors freeze, agree, and go on in the next generation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import ELASTIC, started

from etc_agent.control.causes import ErrorKind
from etc_agent.control.messages import Freeze, PeerLost
from etc_agent.control.redundancy import Redundancy, Scheme
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation, Trigger
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.records import Failure, FailureKind, Outcome, Phase
from etc_agent.reconfig.known.view import Policy, Wait
from etc_agent.reconfig.known.worker_view import WorkerView
from etc_agent.reconfig.leader import decide
from etc_agent.reconfig.loss.losses import suspense
from etc_agent.reconfig.member import summarise
from etc_agent.simulator.cluster.at_rest import Cluster

STAGES = Policy(1, 2, num_slots=2, initial=ParallelConfig(pp=2, dp=2))
WITH_COPIES = Policy(1, 1, num_slots=2, initial=ParallelConfig(pp=2), redundancy=Redundancy(Scheme.PEER))


def killed(slot: str) -> Failure:
    return Failure(slot, FailureKind.KILLED, 137, "pid 7 was killed by SIGKILL")


def kill(cluster: Cluster, node: str, index: int) -> None:
    cluster.fail(node, index, killed(f"{node}/{index}"))


def four(policy: Policy = STAGES) -> Cluster:
    cluster = started(policy, "a", "b")
    cluster.is_quiet = False  # growing back is another matter
    return cluster


def test_the_survivors_of_a_killed_worker_go_on_without_a_restart() -> None:
    cluster = four()
    kill(cluster, "b", 1)
    cluster.run()
    recovered = cluster.committed
    assert not recovered.is_fresh
    assert recovered.lost == (Slot("b", 1),)
    assert set(recovered.placement) == {Slot("a", 0), Slot("a", 1), Slot("b", 0)}
    assert recovered.placement[0] == Slot("a", 0), "rank 0 stays on its process"
    assert cluster.agreed == [(1, 7, True)] * 3
    assert (cluster.num_started, cluster.current.restarts, cluster.current.loss) == (4, 0, None)
    assert recovered.reason == "the worker on b/1 failed: pid 7 was killed by SIGKILL; the survivors go on"
    history = cluster.history[recovered.id]
    assert (history.outcome, history.kept, history.started, history.stopped) == ("committed", 3, 0, 0)
    assert {"freeze", "decide", "prepare", "switch"} <= set(history.phases_ms)
    assert history.trigger is Trigger.WORKER_KILLED
    cluster.assert_consistent()


def test_the_job_grows_back_by_a_planned_change() -> None:
    cluster = four()
    kill(cluster, "b", 1)
    cluster.run()
    cluster.is_quiet = True
    cluster.run()
    assert cluster.committed.config.num_ranks == 4
    assert cluster.committed.reason == "it grows to the wanted size"
    assert not cluster.committed.is_fresh
    assert cluster.num_started == 5
    cluster.assert_consistent()


def test_nothing_is_begun_beside_the_first_step_after_a_loss_until_a_second_has_passed() -> None:
    cluster = four()
    kill(cluster, "b", 1)
    cluster.is_quiet, cluster.has_first_step = True, False
    cluster.run()
    assert cluster.committed.lost
    assert cluster.committed.config.num_ranks < 4
    assert decide(cluster.view()) == Wait(1.0)
    cluster.phase_s = 1.0
    cluster.run()
    assert cluster.committed.config.num_ranks == 4


def test_a_warm_spare_takes_the_place_of_a_killed_worker_at_once() -> None:
    cluster = four(replace(STAGES, max_nodes=3))
    cluster.join("c")
    cluster.nodes["c"] = replace(cluster.nodes["c"], spares=(1,))
    kill(cluster, "b", 1)
    cluster.run()
    assert cluster.config == "PP2TP1DP2"
    assert Slot("c", 1) in cluster.committed.placement
    assert cluster.committed.reason.endswith("; the survivors go on with warm spares in c/1")
    told = {kind for kind, _ in cluster.workers["c"][1].told}
    assert Freeze.type not in told, "who joins for the recovery has nothing to freeze, and would end"
    cluster.assert_consistent()


def test_the_slot_of_a_killed_worker_itself_is_used_where_nothing_else_fits() -> None:
    cluster = four(replace(STAGES, allowed=(ParallelConfig(pp=2, dp=2),)))
    kill(cluster, "b", 1)
    cluster.run()
    assert cluster.config == "PP2TP1DP2"
    assert not cluster.committed.is_fresh
    assert cluster.committed.lost == (Slot("b", 1),)
    assert cluster.committed.reason.endswith("; the survivors go on with new workers in b/1")
    assert cluster.num_started == 5
    cluster.assert_consistent()


def test_without_a_replica_all_workers_are_restarted_and_the_tensor_is_named() -> None:
    cluster = started(Policy(1, 1, num_slots=2, initial=ParallelConfig(pp=2), max_restarts=1), "a")
    cluster.descriptions[ParallelConfig(pp=2)] = cluster_layout(ParallelConfig(pp=2))
    kill(cluster, "a", 1)
    cluster.run()
    assert cluster.committed.is_fresh
    assert cluster.committed.reason == (
        "restart 1 of 1: the worker on a/1 failed: pid 7 was killed by SIGKILL; "
        "not handled in place: nobody else holds w of PP2TP1DP1"
    )
    cluster.assert_consistent()


def cluster_layout(config: ParallelConfig) -> object:
    from etc_agent.simulator.cluster.workers import layout_of

    return layout_of(config)


def test_without_a_replica_and_without_a_known_layout_the_survivors_are_asked_first() -> None:
    cluster = started(Policy(1, 1, num_slots=2, initial=ParallelConfig(pp=2), max_restarts=1), "a")
    cluster.descriptions.clear()
    kill(cluster, "a", 1)
    cluster.run()
    assert cluster.committed.is_fresh
    assert cluster.current.loss is None


def test_what_redundancy_can_restore_is_no_obstacle() -> None:
    cluster = started(WITH_COPIES, "a", copied=4)
    cluster.is_quiet = False
    kill(cluster, "a", 1)
    cluster.run()
    assert not cluster.committed.is_fresh
    assert cluster.committed.placement == (Slot("a", 0),)
    assert cluster.gone_back == [4]
    assert cluster.agreed == [(1, 4, True)]
    assert cluster.committed.reason.endswith("; the survivors go on, from the copies of step 4")


def test_without_a_complete_copy_set_all_workers_are_restarted() -> None:
    cluster = started(replace(WITH_COPIES, max_restarts=1), "a")
    kill(cluster, "a", 1)
    cluster.run()
    assert cluster.committed.is_fresh
    assert cluster.committed.reason.endswith("only copies could replace what was lost, and none are complete yet")


def test_with_redundancy_the_layout_is_known_before_anything_is_agreed_on() -> None:
    cluster = started(WITH_COPIES, "a", copied=4)
    cluster.is_quiet = False
    cluster.descriptions.clear()
    kill(cluster, "a", 1)
    cluster.run()
    assert cluster.gone_back == [4]
    assert not cluster.committed.is_fresh


def test_where_a_replica_lives_nobody_goes_back() -> None:
    cluster = started(replace(STAGES, redundancy=Redundancy(Scheme.PEER)), "a", "b", copied=4)
    cluster.is_quiet = False
    kill(cluster, "b", 1)
    cluster.run()
    assert cluster.gone_back == []
    assert cluster.agreed == [(1, 7, True)] * 3


def test_a_second_loss_that_takes_the_last_replica_sends_all_back_although_they_had_agreed_otherwise() -> None:
    policy = replace(STAGES, max_nodes=3, num_slots=2, redundancy=Redundancy(Scheme.PEER))
    cluster = started(policy, "a", "b", "c", copied=4)
    cluster.is_quiet = False
    first, second = (str(slot) for slot in cluster.committed.placement[2:])
    cluster.is_slow = True
    kill(cluster, *_of(first))
    cluster.run()
    assert cluster.agreed
    assert cluster.gone_back == []
    kill(cluster, *_of(second))
    cluster.is_slow = False
    cluster.run()
    assert set(cluster.gone_back) == {4}
    assert not cluster.committed.is_fresh


def test_an_owner_that_is_lost_with_its_keeper_is_a_restart() -> None:
    policy = replace(STAGES, initial=ParallelConfig(pp=4), redundancy=Redundancy(Scheme.PEER), max_restarts=1)
    cluster = started(policy, "a", "b", copied=4)
    kill(cluster, "a", 0)
    kill(cluster, "b", 0)
    cluster.run()
    assert cluster.committed.is_fresh
    assert "nobody else holds w of PP4TP1DP1" in cluster.committed.reason


@pytest.mark.parametrize(("nodes", "is_fresh"), [("b", False), ("ab", True)])
def test_with_parity_one_loss_in_a_group_is_made_good_and_two_are_a_restart(nodes: str, is_fresh: bool) -> None:
    redundancy = Redundancy(Scheme.PARITY)
    policy = Policy(1, 3, num_slots=1, initial=ParallelConfig(pp=3), redundancy=redundancy, max_restarts=1)
    cluster = started(policy, "a", "b", "c", copied=4)
    for node in nodes:
        kill(cluster, node, 0)
    cluster.is_quiet = is_fresh
    cluster.run()
    assert cluster.committed.is_fresh == is_fresh
    if is_fresh:
        assert "nobody else holds w of PP3TP1DP1" in cluster.committed.reason
    else:
        assert set(cluster.gone_back) == {4}


def _of(slot: str) -> tuple[str, int]:
    parsed = Slot.parse(slot)
    return parsed.node, parsed.index


def test_a_worker_that_raises_is_the_jobs_failure_unless_it_is_to_be_replaced() -> None:
    bug = Failure("b/1", FailureKind.RAISED, 3, "ValueError: bad")
    cluster = four(replace(STAGES, max_restarts=1))
    cluster.fail("b", 1, bug)
    cluster.run()
    assert cluster.committed.is_fresh
    assert cluster.committed.trigger is Trigger.WORKER_RAISED
    cluster = four(replace(STAGES, max_restarts=1, replaces_raised=True))
    cluster.fail("b", 1, bug)
    cluster.run()
    assert not cluster.committed.is_fresh
    assert cluster.current.restarts == 1
    assert cluster.committed.reason.startswith("counts as restart 1 of 1: the worker on b/1 failed: ValueError: bad")
    cluster.fail("b", 0, replace(bug, slot="b/0"))
    cluster.run()
    assert (cluster.current.outcome, cluster.current.exit_code) == (Outcome.FAILED, 3)


def test_a_script_without_a_session_is_restarted_as_before() -> None:
    cluster = started(replace(STAGES, max_restarts=1), "a", "b", hooked=False)
    kill(cluster, "b", 1)
    cluster.run()
    assert cluster.committed.is_fresh
    assert cluster.current.restarts == 1


def lost_peer(cluster: Cluster, node: str, index: int, kind: ErrorKind = ErrorKind.PEER_LOST) -> None:
    worker = cluster.workers[node][index]
    generation = cluster.current.committed
    message = PeerLost(generation, 7, "Connection reset by peer", kind)
    cluster.workers[node][index] = replace(worker, peer_lost={**worker.peer_lost, generation: message})


def test_a_connection_that_was_cut_heals_in_place_when_nobody_turns_out_to_be_dead() -> None:
    cluster = four()
    lost_peer(cluster, "a", 0)
    cluster.run()
    assert cluster.current.loss is None, "a node may be dead, which its lease will show"
    cluster.failed_s = 1e9
    cluster.run()
    assert cluster.committed.id == 2
    assert cluster.committed.lost == ()
    assert cluster.committed.trigger is Trigger.CONNECTION_LOST
    assert cluster.committed.placement == cluster.generations[1].placement
    assert cluster.config == "PP2TP1DP2"
    assert cluster.current.restarts == 0
    cluster.assert_consistent()


def test_while_a_node_may_be_lost_the_leader_says_which_one_and_for_how_long_it_waits() -> None:
    cluster = four()
    lost_peer(cluster, "a", 0)
    cluster.run()
    assert decide(cluster.view()) == Wait(1.0), "the death of a worker on a node that lives is known sooner"
    cluster.failed_s = 1.0
    decision = decide(cluster.view())
    assert isinstance(decision, Wait)
    assert decision.why.startswith("a/0 lost the connection to a peer, and no worker is known to have ended")
    assert decision.why.endswith("perhaps node b is lost, which the end of its lease will show within 12 s")
    assert suspense(cluster.view()) == decision.why, "other nodes say so too"
    kill(cluster, "b", 1)
    cluster.run()
    assert suspense(cluster.view()) == ""


def test_a_cut_that_new_groups_do_not_heal_is_a_restart_within_the_budget() -> None:
    cluster = four(replace(STAGES, max_restarts=1))
    cluster.has_first_step = False
    cluster.failed_s = 1e9
    lost_peer(cluster, "a", 0)
    cluster.run()
    assert cluster.committed.id == 2
    lost_peer(cluster, "a", 0)
    cluster.run()
    assert cluster.committed.is_fresh
    assert cluster.current.restarts == 1


def test_deaths_in_a_row_without_a_step_between_them_count_as_restarts() -> None:
    cluster = started(Policy(1, 3, num_slots=2, max_restarts=1), "a", "b", "c")
    cluster.is_quiet = False
    cluster.has_first_step = False
    for node, index in (("c", 1), ("c", 0)):
        kill(cluster, node, index)
        cluster.run()
    assert cluster.current.restarts == 0, "two faults may come soon after each other"
    kill(cluster, "b", 1)
    cluster.run()
    assert cluster.current.restarts == 1
    assert not cluster.committed.is_fresh
    kill(cluster, "b", 0)
    cluster.run()
    assert cluster.current.outcome is Outcome.FAILED
    assert "1 restarts used up" in cluster.current.why


def test_a_worker_that_hangs_alone_is_ended_and_the_others_go_on() -> None:
    cluster = four()
    cluster.failed_s = 6.0
    cluster.fail("b", 0, Failure("b/0", FailureKind.HUNG, 1, "hangs in step 4", at=4.0))
    for node, index in (("a", 0), ("a", 1), ("b", 1)):
        cluster.fail(node, index, Failure(f"{node}/{index}", FailureKind.WAITING, 1, "waits", at=5.0))
    cluster.run()
    assert cluster.committed.lost == (Slot("b", 0),)
    assert ("b", 0) not in cluster.running()
    assert cluster.committed.trigger is Trigger.WORKER_HUNG
    cluster.assert_consistent()


# ---- more losses, in every phase ----------------------------------------------------------------------------------


def stop_at(cluster: Cluster, phase: str) -> None:
    """Let the handling of a loss come to `phase` and no further."""
    cluster.is_deaf = phase == "freezing"
    cluster.is_slow = phase == "proposed"
    cluster.is_switching = phase == "armed"


def go_on(cluster: Cluster) -> None:
    cluster.is_deaf = cluster.is_slow = cluster.is_switching = False
    cluster.catch_up()


@pytest.mark.parametrize("phase", ["freezing", "proposed", "armed"])
@pytest.mark.parametrize("second", [("b", 0), ("a", 0), ("a", 1)])
def test_a_second_loss_in_any_phase_is_handled_with_the_first(phase: str, second: tuple[str, int]) -> None:
    cluster = started(ELASTIC, "a", "b")
    cluster.is_quiet = False
    stop_at(cluster, phase)
    kill(cluster, "b", 1)
    cluster.run()
    assert cluster.current.loss is not None
    kill(cluster, *second)
    cluster.run()
    assert cluster.current.losses == 2, cluster.committed
    go_on(cluster)
    cluster.run()
    assert cluster.current.loss is None
    assert not cluster.committed.is_fresh
    assert set(cluster.committed.lost) == {Slot("b", 1), Slot(*second)}
    assert len(set(cluster.agreed)) == 1, "an agreement is never contradicted"
    cluster.assert_consistent()


@pytest.mark.parametrize("phase", ["freezing", "proposed", "armed"])
def test_a_node_lost_in_any_phase_of_a_loss_joins_it(phase: str) -> None:
    cluster = started(ELASTIC, "a", "b", "c")
    cluster.is_quiet = False
    stop_at(cluster, phase)
    kill(cluster, "b", 1)
    cluster.run()
    cluster.lose("c")
    cluster.run()
    go_on(cluster)
    cluster.run()
    assert cluster.current.loss is None
    assert set(cluster.committed.placement) == {Slot("a", 0), Slot("a", 1), Slot("b", 0)}
    assert not cluster.committed.is_fresh
    cluster.assert_consistent()


@pytest.mark.parametrize("phase", ["proposed", "armed"])
def test_a_loss_during_a_planned_change(phase: str) -> None:
    cluster = started(ELASTIC, "a", "b")
    cluster.is_quiet = False
    stop_at(cluster, phase)
    cluster.ask("PP2TP1DP2")
    cluster.run()
    assert cluster.current.phase is (Phase.PROPOSED if phase == "proposed" else Phase.ARMED)
    kill(cluster, "b", 1)
    cluster.run()
    go_on(cluster)
    cluster.run()
    assert cluster.history[2].outcome == "withdrawn"
    assert cluster.current.loss is None
    assert not cluster.committed.is_fresh
    assert cluster.committed.previous == 1
    cluster.assert_consistent()


def test_where_a_worker_has_entered_an_armed_generation_all_do_before_they_recover_from_it() -> None:
    cluster = started(ELASTIC, "a", "b")
    cluster.is_quiet = False
    cluster.is_switching = True
    cluster.ask("PP2TP1DP2")
    cluster.run()
    cluster.completed = 2
    cluster.enter("a", 0, 2)
    kill(cluster, "b", 1)
    cluster.run()
    assert cluster.history[2].outcome == "committed"
    go_on(cluster)
    cluster.run()
    assert set(cluster.agreed) == {(2, 7, True)}
    assert cluster.committed.previous == 2
    assert cluster.committed.lost == (Slot("b", 1),)
    cluster.assert_consistent()


def test_a_node_that_comes_while_too_few_are_left_leads_to_a_recovery() -> None:
    cluster = started(Policy(2, 2, num_slots=2), "a", "b")
    cluster.lose("b")
    cluster.run()
    assert cluster.current.loss is not None
    assert cluster.running() == {("a", 0), ("a", 1)}, "they keep their state"
    assert all((Freeze.type, 1) in worker.told for worker in cluster.workers["a"].values())
    cluster.join("c")
    cluster.run()
    assert not cluster.committed.is_fresh
    assert {Slot("a", 0), Slot("a", 1)} <= set(cluster.committed.placement)
    cluster.assert_consistent()


def test_survivors_below_the_smallest_number_of_nodes_end_after_the_stated_time() -> None:
    cluster = started(Policy(2, 2, num_slots=2), "a", "b")
    cluster.lose("b")
    cluster.run()
    cluster.phase_s = 1e9
    cluster.run()
    assert cluster.current.outcome is Outcome.FAILED
    assert "timeouts.join_s" in cluster.current.why


def test_a_survivor_whose_state_is_broken_makes_it_a_restart_with_the_reason() -> None:
    cluster = four(replace(STAGES, max_restarts=1))
    cluster.broken = "its old memory had been released"
    kill(cluster, "b", 1)
    cluster.run()
    assert cluster.committed.is_fresh
    assert cluster.committed.reason.endswith("not handled in place: its old memory had been released")
    cluster.assert_consistent()


def test_a_config_that_survivors_refuse_is_replaced_by_a_smaller_one() -> None:
    cluster = four()
    cluster.refusing_once = "out of memory"
    kill(cluster, "b", 1)
    cluster.run()
    assert not cluster.committed.is_fresh
    assert cluster.current.loss is None


def test_a_spare_that_ends_in_the_slot_of_a_lost_worker_is_not_the_end_of_the_script_there() -> None:
    before = Generation(1, ParallelConfig(dp=2), (Slot("a", 0), Slot("a", 1)), "a:1", previous=0)
    after = replace(before, id=2, previous=1, lost=(Slot("a", 1),))
    survivor, spare = WorkerView(0, 1, in_session=True), WorkerView(1, 2, in_session=True, exit_code=0)
    ack = summarise("a", before, {1: before, 2: after}, {0: survivor, 1: spare})
    assert (ack.ended, ack.finished) == ("", False)


def joining_in_an_armed_change() -> Cluster:
    """A job on node a is armed to grow onto node b, and nobody has said yet how the switch ended."""
    cluster = started(ELASTIC, "a")
    cluster.is_switching = True
    cluster.join("b")
    cluster.run()
    assert cluster.current.phase is Phase.ARMED
    return cluster


def test_a_node_that_is_lost_while_it_joins_costs_no_restart() -> None:
    cluster = joining_in_an_armed_change()
    cluster.lose("b")
    cluster.run()
    assert cluster.history[2].outcome == "withdrawn"
    go_on(cluster)
    cluster.run()
    assert (cluster.committed.nodes, cluster.current.restarts) == (("a",), 0)
    assert not cluster.committed.is_fresh
    cluster.assert_consistent()


def test_old_workers_that_do_not_come_free_of_a_joiner_that_has_died_are_frozen() -> None:
    cluster = joining_in_an_armed_change()
    kill(cluster, "b", 0)
    cluster.run()
    assert (cluster.current.phase, cluster.current.losses) == (Phase.ARMED, 0), "they may find out by themselves"
    cluster.failed_s = 30.0
    cluster.run()
    cluster.failed_s = 0.0
    assert cluster.history[2].outcome == "withdrawn"
    go_on(cluster)
    cluster.run()
    assert (cluster.current.loss, cluster.current.restarts, cluster.current.losses) == (None, 0, 1)
    assert not cluster.committed.is_fresh
    cluster.assert_consistent()


def test_a_node_that_is_lost_after_others_have_seen_it_join_is_recovered_from() -> None:
    cluster = joining_in_an_armed_change()
    cluster.completed = 2
    cluster.enter("a", 0, 2)
    cluster.lose("b")
    cluster.run()
    assert cluster.history[2].outcome == "committed"
    go_on(cluster)
    cluster.run()
    assert cluster.committed.previous == 2
    assert {slot.node for slot in cluster.committed.lost} == {"b"}
    cluster.assert_consistent()


def test_a_joiner_that_dies_in_an_armed_recovery_is_asked_after_before_that_is_withdrawn() -> None:
    cluster = four(replace(STAGES, max_nodes=3))
    cluster.join("c")
    cluster.nodes["c"] = replace(cluster.nodes["c"], spares=(1,))
    cluster.is_switching = True
    kill(cluster, "b", 1)
    cluster.run()
    assert (cluster.current.phase, cluster.current.proposed) == (Phase.ARMED, 2)
    cluster.completed = 2
    cluster.enter("a", 0, 2)
    kill(cluster, "c", 1)
    cluster.run()
    assert cluster.history[2].outcome == "committed", "one has entered it"
    go_on(cluster)
    cluster.run()
    assert cluster.committed.previous == 2
    assert cluster.committed.lost == (Slot("c", 1),)
    assert cluster.current.loss is None
    cluster.assert_consistent()


def test_where_memory_was_released_and_all_survivors_have_completed_the_migration_they_enter_it() -> None:
    cluster = started(ELASTIC, "a", "b")
    cluster.is_quiet = False
    cluster.is_switching = True
    cluster.ask("PP2TP1DP2")
    cluster.run()
    cluster.completed, cluster.broken = 2, "its old memory had been released"
    kill(cluster, "b", 1)
    cluster.run()
    assert cluster.history[2].outcome == "committed", "there is no way back, and a way on"
    cluster.broken = ""
    go_on(cluster)
    cluster.run()
    assert cluster.committed.previous == 2
    assert not cluster.committed.is_fresh
    cluster.assert_consistent()


def leave(cluster: Cluster, node: str, index: int, *, has_closed: bool = False) -> None:
    """A worker exits with code 0."""
    worker = cluster.workers[node][index]
    cluster.workers[node][index] = replace(worker, exit_code=0, has_closed=has_closed)


def test_a_worker_that_exits_with_code_0_out_of_its_session_is_lost_as_soon_as_another_one_misses_it() -> None:
    cluster = four()
    leave(cluster, "b", 1)
    cluster.run()
    assert cluster.committed.id == 1, "perhaps all of them come to the end of the script in this way"
    lost_peer(cluster, "a", 1)
    cluster.run()
    assert cluster.committed.lost == (Slot("b", 1),)
    assert "b/1 failed: it ended with exit code 0 before its session was closed" in cluster.committed.reason
    assert cluster.committed.trigger is Trigger.WORKER_ENDED
    assert cluster.current.restarts == 0
    cluster.assert_consistent()


def test_workers_that_all_exit_with_code_0_out_of_their_sessions_have_finished_the_job() -> None:
    cluster = four()
    for node, index in (("a", 0), ("a", 1), ("b", 0), ("b", 1)):
        leave(cluster, node, index)
        cluster.run()
    assert (cluster.current.outcome, cluster.current.losses) == (Outcome.SUCCEEDED, 0)


def test_a_worker_that_has_closed_its_session_has_come_to_the_end_of_the_script() -> None:
    cluster = four()
    leave(cluster, "b", 1, has_closed=True)
    lost_peer(cluster, "a", 1)
    cluster.run()
    assert cluster.current.loss is None


@pytest.mark.parametrize("phase", ["freezing", "proposed", "armed"])
def test_a_survivor_that_exits_with_code_0_during_the_recovery_is_lost_too(phase: str) -> None:
    cluster = four()
    stop_at(cluster, phase)
    kill(cluster, "b", 1)
    cluster.run()
    leave(cluster, "a", 1)
    cluster.run()
    go_on(cluster)
    cluster.run()
    assert cluster.config == "PP2TP1DP1"
    assert set(cluster.committed.placement) == {Slot("a", 0), Slot("b", 0)}
    assert cluster.current.restarts == 0
    cluster.assert_consistent()


def test_a_spare_that_exits_with_code_0_before_it_has_joined_a_recovery_is_not_waited_for() -> None:
    cluster = four(replace(STAGES, max_nodes=3))
    cluster.join("c")
    cluster.nodes["c"] = replace(cluster.nodes["c"], spares=(1,))
    cluster.is_slow = True
    kill(cluster, "b", 1)
    cluster.run()
    assert cluster.current.proposed == 2
    leave(cluster, "c", 1)
    cluster.is_slow = False
    cluster.nodes["c"] = replace(cluster.nodes["c"], spares=())
    cluster.run()
    assert cluster.history[2].outcome == "withdrawn"
    assert "c/1: it ended with exit code 0 before it had joined" in cluster.history[2].why
    assert cluster.committed.previous == 1
    assert cluster.current.restarts == 0
    cluster.assert_consistent()
