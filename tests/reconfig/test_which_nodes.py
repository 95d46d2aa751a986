"""Which nodes hold workers, in which order, and what is waited for."""

from __future__ import annotations

from dataclasses import replace

from jobs import ELASTIC, started

from etc_agent.parallel.config import ParallelConfig
from etc_agent.reconfig.known.records import Result
from etc_agent.reconfig.known.view import Policy
from etc_agent.simulator.cluster.at_rest import Cluster


def ranked(policy: Policy, **ranks: int) -> Cluster:
    """A job whose nodes came in the order given, each with the rank that its user wanted."""
    cluster = Cluster(policy)
    for name, rank in ranks.items():
        cluster.join(name)
        cluster.nodes[name] = replace(cluster.nodes[name], rank=rank)
    cluster.run()
    return cluster


def test_nodes_are_in_the_order_of_the_ranks_that_were_asked_for_and_survivors_keep_theirs() -> None:
    cluster = ranked(Policy(1, 4, num_slots=1), a=2, b=0, c=3, d=1)
    assert cluster.committed.nodes == ("b", "d", "a", "c")
    cluster.lose("d")
    cluster.run()
    assert cluster.committed.nodes == ("b", "c", "a"), "c takes the rank that is free"


def test_a_joiner_that_sorts_before_the_others_leaves_rank_0_where_it_is() -> None:
    cluster = ranked(Policy(1, 3, num_slots=1), b=1)
    cluster.join("a")
    cluster.nodes["a"] = replace(cluster.nodes["a"], rank=0)
    cluster.run()
    assert set(cluster.committed.nodes) == {"a", "b"}
    assert cluster.committed.placement[0].node == "b", "a worker that stays keeps rank 0"


def test_a_spare_node_replaces_a_lost_one_and_one_that_leaves() -> None:
    cluster = started(ELASTIC, "a", "b", "c", "d", "e")
    cluster.lose("b")
    cluster.run()
    assert cluster.committed.nodes == ("a", "c", "d")
    cluster.drain("c")
    cluster.run()
    assert set(cluster.committed.nodes) == {"a", "d", "e"}
    assert not cluster.committed.is_fresh


def test_fewer_workers_and_a_leave_wait_for_nobody_and_a_joiner_waits_for_more_of_them() -> None:
    cluster = started(ELASTIC, "a", "b")
    cluster.is_quiet = False
    cluster.join("c")
    cluster.run()
    assert cluster.current.next_id == 2, "more nodes may be about to come"
    cluster.ask("2")
    cluster.run()
    assert cluster.committed.config.num_ranks == 2
    cluster.drain(cluster.committed.nodes[0])
    cluster.run()
    assert cluster.committed.id == 3


def test_what_a_job_starts_as_stays_wanted_until_another_size_is_asked_for() -> None:
    cluster = started(Policy(1, 3, num_slots=2, initial=ParallelConfig(tp=2)), "a", "b")
    assert cluster.config == "PP1TP2DP1"
    cluster.ask("max")
    cluster.run()
    assert cluster.committed.config.num_ranks == 4
    cluster.join("c")
    cluster.run()
    assert cluster.committed.config.num_ranks == 6
    cluster.ask("nodes=1")
    cluster.run()
    cluster.drain(cluster.committed.nodes[0])
    cluster.run()
    assert cluster.committed.config.num_ranks == 2
    assert cluster.replies[-1].result is Result.DONE
