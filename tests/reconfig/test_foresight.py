"""Layouts that a recovery needs are known before anything is lost."""

from __future__ import annotations

from dataclasses import replace

from jobs import ELASTIC, started

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.observing import JobRecords, Observer
from etc_agent.reconfig.known.records import Loss
from etc_agent.reconfig.known.view import Foresee, Policy
from etc_agent.reconfig.leader import decide
from etc_agent.simulator.cluster.at_rest import Cluster


def before_foresight(policy: Policy, *nodes: str) -> Cluster:
    cluster = started(policy, *nodes)
    cluster.descriptions.clear()
    return cluster


def asked(cluster: Cluster) -> set[str]:
    decision = decide(cluster.view())
    assert isinstance(decision, Foresee)
    return {str(config) for config in decision.configs}


def test_the_loss_of_any_one_worker_or_node_finds_its_layouts_known() -> None:
    cluster = before_foresight(ELASTIC, "a", "b")
    cluster.lead()
    assert asked(cluster) == {"PP1TP1DP3", "PP1TP1DP2"}
    cluster.run()
    known = dict(cluster.descriptions)
    cluster.lose("b")
    cluster.run()
    assert cluster.committed.config == ParallelConfig(dp=2)
    assert ParallelConfig(dp=2) in known


def test_what_the_model_refuses_is_passed_over() -> None:
    cluster = Cluster(ELASTIC, refuses={"PP1TP1DP3": "a global batch of 32 cannot be divided over dp=3"})
    for node in ("a", "b"):
        cluster.join(node)
    cluster.run()
    assert isinstance(cluster.descriptions[ParallelConfig(pp=3)], tuple), "the next one of three workers"


def test_nothing_is_asked_for_a_loss_that_cannot_be_handled_in_place() -> None:
    cluster = before_foresight(Policy(1, 1, num_slots=2, initial=ParallelConfig(pp=2)), "a")
    cluster.run()
    assert set(cluster.descriptions) == {ParallelConfig(pp=2)}


def test_the_lead_goes_to_a_node_whose_workers_can_be_asked() -> None:
    cluster = started(ELASTIC, "a", "b")
    loss = Loss(1, (str(Slot("a", 0)), str(Slot("a", 1))), "node a was cut off")
    current = cluster.view().current

    def may_lead(node: str) -> bool:
        records = JobRecords(
            nodes=tuple(cluster.nodes.values()), leader="b", generations=cluster.generations,
            current=replace(current, loss=loss),
        )
        return Observer().observe(records, 1.0).may_lead(node, records, 1.0, 10.0)

    assert not may_lead("a")
    assert may_lead("b")
