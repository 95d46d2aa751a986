"""A node that may be cut off stops its workers before others go on, and never while only etcd is away."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from jobs import ELASTIC, started

from etc_agent.reconfig.fencing import FOR_EVER, Contact, Evidence, Fencing, PeerStatus
from etc_agent.reconfig.known.records import Failure, FailureKind, Result
from etc_agent.reconfig.known.view import Policy, uncleared
from etc_agent.simulator.cluster.at_rest import Cluster

LEASES = st.integers(4, 120).map(Fencing)
TEN = Fencing(10.0)
B, C = frozenset({"b"}), frozenset({"c"})
NOW = 1000.0


def lost_lease(**facts: object) -> Evidence:
    """What a node knows whose lease has just run out."""
    return Evidence(lease_until=NOW, heard_at=NOW - TEN.ttl_s, **facts)  # type: ignore[arg-type]


def lives_on(evidence: Evidence, fencing: Fencing = TEN) -> bool:
    return evidence.workers_until(fencing, NOW) > NOW


# ---- what a node makes of what it hears -----------------------------------------------------------------------


@given(LEASES)
def test_a_node_that_hears_nobody_stops_when_its_lease_is_over_and_not_before(fencing: Fencing) -> None:
    alone = Evidence(lease_until=NOW, heard_at=NOW - fencing.ttl_s, nodes=B | C)
    assert alone.workers_until(fencing, NOW - 1) == NOW
    assert fencing.ttl_s + fencing.fence_s <= max(fencing.lease_s, 2)


def test_one_peer_that_hears_etcd_means_that_this_node_is_cut_off() -> None:
    statuses = {"b": PeerStatus(NOW, followed_s=0.0), "c": PeerStatus(NOW, followed_s=500.0)}
    assert not lives_on(lost_lease(nodes=B | C, statuses=statuses))
    assert not lives_on(lost_lease(nodes=B | C, companions=C, statuses=statuses, stepped_at=NOW)), "even if steps go on"


def test_while_all_other_nodes_have_lost_etcd_too_long_steps_and_scripts_without_any_go_on() -> None:
    statuses = {"b": PeerStatus(NOW, followed_s=0.0), "c": PeerStatus(NOW, followed_s=0.0)}
    assert lives_on(lost_lease(nodes=B | C, statuses=statuses))


def test_all_other_nodes_have_to_answer_for_one_that_does_not_may_have_taken_over() -> None:
    others = frozenset(f"n{number}" for number in range(63))
    statuses = {name: PeerStatus(NOW, followed_s=0.0) for name in others}
    assert lives_on(lost_lease(nodes=others, statuses=statuses))
    del statuses["n17"]
    assert not lives_on(lost_lease(nodes=others, statuses=statuses))


def test_steps_speak_for_the_nodes_that_they_need_and_for_no_others() -> None:
    assert lives_on(lost_lease(nodes=B, companions=B, stepped_at=NOW - 0.5))
    assert not lives_on(lost_lease(nodes=B | C, companions=B, stepped_at=NOW - 0.5)), "c may have taken over"
    assert not lives_on(lost_lease(nodes=B, stepped_at=NOW - 0.5)), "these steps need nobody"


def test_the_time_that_is_left_counts_from_the_last_word_and_not_from_now() -> None:
    evidence = lost_lease(nodes=B, statuses={"b": PeerStatus(NOW - 3, followed_s=0.0)})
    assert evidence.workers_until(TEN, NOW) == evidence.workers_until(TEN, NOW + 2)
    assert evidence.workers_until(TEN, NOW) == NOW - 3 + TEN.trust_s - TEN.fence_s


def test_a_peer_that_has_just_found_etcd_again_leaves_time_to_find_it_too() -> None:
    evidence = lost_lease(nodes=B, statuses={"b": PeerStatus(NOW, followed_s=1.0)})
    assert evidence.workers_until(TEN, NOW) == NOW + TEN.trust_s - 1 - TEN.fence_s


def test_a_node_that_knows_of_no_other_goes_on_as_long_as_its_agent_can_answer_newcomers() -> None:
    assert lost_lease().workers_until(TEN, NOW + 1e4) > NOW + 1e4
    newcomer = lost_lease(statuses={"d": PeerStatus(NOW - 1, followed_s=60.0)})
    assert not lives_on(newcomer)


def test_contact_with_etcd_begins_anew_after_a_silence() -> None:
    contact = Contact().at(10.0, 10.0, TEN).at(13.0, 12.0, TEN)
    assert contact.followed_s(13.0) == 3.0
    silent = contact.at(18.0, 12.0, TEN)
    assert silent.followed_s(18.0) == 0.0
    assert silent.at(19.0, 18.5, TEN).followed_s(20.0) == 1.0


def test_a_reason_names_the_node_that_counts() -> None:
    assert "node c hears it" in lost_lease(nodes=B | C, statuses={
        "b": PeerStatus(NOW, followed_s=0.0), "c": PeerStatus(NOW, followed_s=500.0)
    }).why(TEN, NOW)
    assert "node b does not answer" in lost_lease(nodes=B).why(TEN, NOW)
    assert Evidence(NOW).workers_until(TEN, NOW) < FOR_EVER


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


def test_a_node_that_stopped_its_workers_and_is_back_before_anybody_noticed_joins_the_survivors() -> None:
    cluster = started(ELASTIC, "a", "b")
    cluster.cut_off("a")
    cluster.fence("a")
    cluster.come_back("a")
    cluster.run()
    assert {slot.node for slot in cluster.generations[2].lost} == {"a"}
    assert cluster.committed.id == 3
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


def test_a_request_that_comes_while_nodes_are_waited_for_has_its_answer() -> None:
    cluster = started(Policy(2, 3, num_slots=2), "a", "b")
    cluster.lose("a")
    cluster.is_quiet = False
    for text, result in (("2", Result.PENDING), ("nonsense", Result.REFUSED)):
        cluster.ask(text)
        cluster.run()
        assert cluster.replies[-1].request == text
        assert cluster.replies[-1].result is result
    assert cluster.current.committed == 1


def test_workers_of_a_fresh_generation_start_when_those_before_have_ended_everywhere() -> None:
    cluster = started(ELASTIC, "a", "b", hooked=False)
    before = cluster.nodes["a"]
    cluster.fail("b", 0, Failure("b/0", FailureKind.RAISED, 1, "ValueError: once"))
    view = cluster.view()
    fresh = replace(view.generations[1], id=2)
    waiting = replace(view, current=replace(view.current, committed=2), generations={**view.generations, 2: fresh})
    assert before.cleared == 1
    assert uncleared(view) == frozenset()
    assert uncleared(waiting) == {"a", "b"}
    gone = replace(waiting, nodes=(), absent_s={"a": 0.0, "b": ELASTIC.fence_s}, cleared={"a": 1, "b": 1})
    assert uncleared(gone) == {"a"}, "b must have stopped its workers by itself"
    assert uncleared(replace(gone, cleared={"a": 2})) == frozenset(), "a said so before it left"
