"""How long everything has been as it is, by the clock of whoever asks."""

from __future__ import annotations

from dataclasses import replace

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.observing import JobRecords, Observer
from etc_agent.reconfig.known.records import Ack, Current, Failure, FailureKind, NodeRecord, NodeState
from etc_agent.reconfig.known.records import Testimony as Testified
from etc_agent.reconfig.known.view import Policy, View

A, B = (NodeRecord(name, name, 1, 1, name) for name in "ab")
GENERATION = Generation(1, ParallelConfig(), (Slot("a", 0),), "a:1", previous=0)
RECORDS = JobRecords(nodes=(A, B), leader="a", current=Current(committed=1), generations={1: GENERATION})


def seen(*moments: tuple[float, JobRecords]) -> Observer:
    observer = Observer()
    for now, records in moments:
        observer = observer.observe(records, now)
    return observer


def view(observer: Observer, records: JobRecords, now: float, alive_at: dict[str, float] | None = None) -> View:
    return observer.view(Policy(1, 2, 1), records, {}, now, 100.0, alive_at or {})


def test_times_count_from_the_last_change_of_what_they_are_about() -> None:
    draining = replace(RECORDS, nodes=(A, replace(B, state=NodeState.DRAINING)))
    later = replace(draining, current=replace(RECORDS.current, next_id=5))
    shown = view(seen((10.0, RECORDS), (20.0, draining), (23.0, later), (24.0, later)), later, 30.0)
    assert (shown.quiet_s, shown.phase_s, shown.failed_s) == (10.0, 7.0, 0.0)


def test_what_only_a_node_s_own_agent_needs_to_say_is_no_change_of_the_nodes() -> None:
    said = replace(RECORDS, nodes=(replace(A, cleared=1, store_port=7, contact_port=9), B))
    assert view(seen((10.0, RECORDS), (20.0, said)), said, 30.0).quiet_s == 20.0


def test_a_failure_counts_from_its_first_report_in_the_committed_generation() -> None:
    failed = replace(RECORDS, acks={(1, "a"): Ack(1, "a", failure=Failure("a/0", FailureKind.KILLED, 137, "killed"))})
    again = replace(failed, current=replace(RECORDS.current, committed=2))
    assert view(seen((10.0, RECORDS), (12.0, failed), (15.0, failed)), failed, 20.0).failed_s == 8.0
    assert view(seen((12.0, failed), (15.0, again)), again, 20.0).failed_s == 0.0


def test_a_node_that_is_gone_is_remembered_with_what_it_said_until_it_is_back() -> None:
    without = replace(RECORDS, nodes=(A,))
    observer = seen((10.0, replace(RECORDS, nodes=(A, replace(B, cleared=1)))), (12.0, without), (15.0, without))
    shown = view(observer, without, 20.0, {"a": 19.0, "b": 18.0})
    assert shown.absent_s == {"b": 8.0}
    assert shown.alive_s == {"b": 2.0}, "nobody has to ask a node that etcd shows"
    assert shown.cleared == {"a": 0, "b": 1}
    assert view(observer.observe(RECORDS, 21.0), RECORDS, 22.0).absent_s == {}


def test_a_node_that_is_known_to_have_no_workers_any_more_is_lost_at_once() -> None:
    without = replace(RECORDS, nodes=(A,), gone={"b": Testified(B.instance)})
    observer = seen((10.0, RECORDS), (12.0, without))
    shown = view(observer, without, 12.0)
    assert (shown.testified, shown.lost("ab")) == ({"b"}, ["b"])
    assert replace(shown, connected_s=0.0).lost("ab") == ["b"], "whoever leads, since when does not matter"
    assert view(observer.observe(RECORDS, 13.0), RECORDS, 13.0).testified == frozenset(), "it is back"


def test_what_is_known_of_an_earlier_instance_says_nothing_about_a_later_one() -> None:
    later = replace(RECORDS, nodes=(A, replace(B, instance="later")))
    without = replace(RECORDS, nodes=(A,), gone={"b": Testified(B.instance)})
    shown = view(seen((10.0, later), (12.0, without)), without, 12.0)
    assert (shown.testified, shown.lost("ab")) == (frozenset(), [])


def test_nodes_with_workers_lead_and_others_where_none_is_here_or_none_does() -> None:
    leaderless = replace(RECORDS, leader="")
    observer = seen((10.0, RECORDS), (20.0, leaderless))
    assert observer.may_lead("a", leaderless, 20.0, 10.0)
    assert not observer.may_lead("b", leaderless, 29.0, 10.0)
    assert observer.may_lead("b", leaderless, 31.0, 10.0)
    alone = replace(RECORDS, nodes=(B,), leader="b")
    assert seen((10.0, alone)).may_lead("b", alone, 100.0, 10.0), "and keeps the lead"
