"""Slots and nodes that take no workers, and the ones that fail so often that they become such."""

from __future__ import annotations

from dataclasses import replace

from jobs import started

from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.records import Current, Failure, FailureKind
from etc_agent.reconfig.known.view import Policy
from etc_agent.reconfig.sizes.controls import Cordon
from etc_agent.simulator.cluster.at_rest import Cluster

TWICE = Policy(1, 3, num_slots=2, max_restarts=100, alike_failures=0, max_per_window=2, window_s=600.0)


def kill(cluster: Cluster, slot: Slot) -> None:
    cluster.fail(slot.node, slot.index, Failure(str(slot), FailureKind.KILLED, 137, "pid 7 was killed by SIGKILL"))
    cluster.run()


def test_a_slot_that_fails_again_within_the_window_gets_no_more_workers() -> None:
    cluster = started(TWICE, "a", "b")
    kill(cluster, Slot("b", 1))
    assert cluster.committed.config.num_ranks == 4, "it grew back"
    assert cluster.cordons == ()
    cluster.time = 599.0
    kill(cluster, Slot("b", 1))
    (cordon,) = cluster.cordons
    assert (str(cordon), cordon.order.by, cordon.order.since) == ("b/1", "the leader", 599.0)
    assert cordon.order.why == "failed 2 times within 600 s"
    assert cluster.committed.config.num_ranks == 3
    assert Slot("b", 1) not in cluster.committed.placement
    cluster.assert_consistent()


def test_failures_that_are_far_apart_or_of_different_slots_are_no_offence() -> None:
    cluster = started(TWICE, "a", "b")
    kill(cluster, Slot("b", 1))
    cluster.time = 300.0
    kill(cluster, Slot("a", 1))
    cluster.time = 601.0
    kill(cluster, Slot("b", 1))
    assert cluster.cordons == ()
    assert cluster.committed.config.num_ranks == 4


def test_a_node_that_is_lost_again_is_cordoned_as_a_whole() -> None:
    cluster = started(TWICE, "a", "b")
    for _ in range(2):
        cluster.lose("b")
        cluster.run()
        cluster.join("b")
        cluster.run()
    assert [str(cordon) for cordon in cluster.cordons] == ["b"]
    assert cluster.committed.nodes == ("a",)
    cluster.assert_consistent()


def test_no_cordon_takes_the_last_slot_or_a_node_that_the_job_needs() -> None:
    alone = started(replace(TWICE, max_nodes=1), "a")
    for index in (1, 1, 1, 0, 0, 0):
        if ("a", index) in alone.running():
            kill(alone, Slot("a", index))
    assert [str(cordon) for cordon in alone.cordons] == ["a/1"]
    needed = started(replace(TWICE, min_nodes=2), "a", "b")
    for _ in range(2):
        needed.lose("b")
        needed.run()
        needed.join("b")
        needed.run()
    assert needed.cordons == ()


def test_a_restart_leaves_a_cordoned_slot_out() -> None:
    cluster = started(replace(TWICE, max_per_window=1), "a", "b")
    cluster.fail("b", 1, Failure("b/1", FailureKind.RAISED, 1, "CUDA error: an illegal memory access"))
    cluster.run()
    assert cluster.committed.is_fresh
    assert [str(cordon) for cordon in cluster.cordons] == ["b/1"]
    assert Slot("b", 1) not in cluster.committed.placement
    assert cluster.committed.config.num_ranks == 3
    cluster.assert_consistent()


def test_a_worker_stays_where_an_administrator_cordons_its_slot_until_it_is_lost() -> None:
    cluster = started(TWICE, "a", "b")
    cluster.cordons = (Cordon("b", 1),)
    cluster.run()
    assert cluster.committed.id == 1
    kill(cluster, Slot("b", 1))
    assert Slot("b", 1) not in cluster.committed.placement
    assert cluster.committed.config.num_ranks == 3


def test_a_cordoned_node_that_joins_is_not_used() -> None:
    cluster = started(TWICE, "a")
    cluster.cordons = (Cordon("b"),)
    cluster.join("b")
    cluster.run()
    assert cluster.committed.nodes == ("a",)
    cluster.cordons = ()
    cluster.run()
    assert set(cluster.committed.nodes) == {"a", "b"}


def test_offences_survive_a_change_of_leader() -> None:
    cluster = started(TWICE, "a", "b")
    kill(cluster, Slot("b", 1))
    assert Current.from_json(cluster.current.to_json()) == cluster.current
    assert [offence.name for offence in cluster.current.offences] == ["b/1"]
