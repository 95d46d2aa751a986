"""Every event in every phase of a loss: survivors never disagree, nothing is restarted without need, all comes to rest,
and a new leader that reads the same records decides the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from etc_agent.control.messages import PeerLost
from etc_agent.parallel.generation import Generation
from etc_agent.reconfig.known.records import Ack, Current, Failure, FailureKind, NodeRecord, Outcome
from etc_agent.reconfig.known.view import Policy, View, Wait
from etc_agent.reconfig.leader import decide
from etc_agent.reconfig.loss.replicas import unheld
from etc_agent.simulator.cluster.at_rest import Cluster
from etc_agent.simulator.cluster.workers import layout_of

POLICY = Policy(1, 4, num_slots=2, max_restarts=9, alike_failures=0)


def reread(view: View) -> View:
    """The view of a leader that has read everything from etcd."""

    def again(record: type[Ack | Current | NodeRecord | Generation], value: object) -> object:
        return record.from_json(json.loads(json.dumps(value.to_json())))  # type: ignore[attr-defined]

    return replace(
        view,
        current=again(Current, view.current),
        generations={id_: again(Generation, each) for id_, each in view.generations.items()},
        acks={key: again(Ack, each) for key, each in view.acks.items()},
        nodes=tuple(again(NodeRecord, each) for each in view.nodes),
    )


@dataclass
class Watched(Cluster):
    """A cluster in which each decision is made by a new leader too, and that notices a needless restart."""

    may_restart: bool = False

    def lead(self) -> bool:
        view = self.view()
        decision = decide(view)
        if not isinstance(decision, Wait):
            assert decide(reread(view)) == decision
        before = self.current.committed
        acted = super().lead()
        if before and self.current.committed != before and self.committed.is_fresh and not self.may_restart:
            config = self.generations[before].config
            lost = [
                rank for rank, slot in enumerate(self.generations[before].placement)
                if (slot.node, slot.index) not in self.running()
            ]
            assert unheld(layout_of(config), lost) is not None, self.committed.reason
        return acted


def in_phase(phase: str) -> Watched:
    """A job of PP2TP1DP2 on two of three nodes that has lost the worker in b/1, and has come to `phase` of that."""
    cluster = Watched(POLICY)
    for node in ("a", "b"):
        cluster.join(node)
    cluster.ask("PP2TP1DP2")
    cluster.run()
    cluster.is_quiet = False
    if phase.startswith("change"):
        cluster.is_slow, cluster.is_switching = phase == "change proposed", phase != "change proposed"
        cluster.ask("PP1TP1DP4")
        cluster.run()
        if phase == "change entered by one":
            cluster.completed = cluster.current.proposed
            cluster.enter("a", 0, cluster.current.proposed)
    cluster.is_deaf = phase == "freezing"
    cluster.is_slow = cluster.is_slow or phase == "proposed"
    cluster.is_switching = cluster.is_switching or phase.startswith("armed")
    kill(cluster, "b", 1)
    if phase != "noticed":
        cluster.run()
    if phase == "armed, entered by one":
        cluster.completed = cluster.current.proposed
        cluster.enter("a", 0, cluster.current.proposed)
    return cluster


PHASES = (
    "noticed", "freezing", "proposed", "armed", "armed, entered by one", "change proposed", "change armed",
    "change entered by one",
)


def kill(cluster: Cluster, node: str, index: int, kind: FailureKind = FailureKind.KILLED) -> None:
    if node in cluster.workers and cluster.workers[node].get(index) and cluster.workers[node][index].is_running:
        cluster.fail(node, index, Failure(f"{node}/{index}", kind, 137, "it ended"))


def lose_peer(cluster: Cluster) -> None:
    for workers in cluster.workers.values():
        for index, worker in workers.items():
            generation = max((1, *worker.switched))
            message = PeerLost(generation, 7, "Connection reset by peer")
            workers[index] = replace(worker, peer_lost={**worker.peer_lost, generation: message})


def raise_error(cluster: Cluster) -> None:
    assert isinstance(cluster, Watched)
    cluster.may_restart = True
    kill(cluster, "a", 1, FailureKind.RAISED)


EVENTS: dict[str, Callable[[Cluster], None]] = {
    "nothing": lambda cluster: None,
    "a/0 dies": lambda cluster: kill(cluster, "a", 0),
    "a/1 dies": lambda cluster: kill(cluster, "a", 1),
    "b/0 dies": lambda cluster: kill(cluster, "b", 0),
    "a/0 ends silently": lambda cluster: kill(cluster, "a", 0, FailureKind.SILENT),
    "a/1 raises": raise_error,
    "node a is lost": lambda cluster: cluster.lose("a"),
    "node b is lost": lambda cluster: cluster.lose("b"),
    "node c comes": lambda cluster: cluster.join("c"),
    "node b drains": lambda cluster: cluster.drain("b"),
    "another size is asked for": lambda cluster: cluster.ask("2"),
    "all notice": lose_peer,
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("phase", PHASES)
def test_every_event_in_every_phase_of_a_loss(phase: str, event: str) -> None:
    cluster = in_phase(phase)
    EVENTS[event](cluster)
    cluster.run()
    cluster.is_deaf = cluster.is_slow = cluster.is_switching = False
    for _ in range(3):
        cluster.catch_up()
        cluster.run()
        cluster.failed_s = 1e9
        cluster.run()
        cluster.failed_s = 0.0
    cluster.is_quiet = True
    cluster.run()
    assert cluster.current.outcome is Outcome.RUNNING, cluster.current.why
    assert cluster.current.loss is None
    assert isinstance(decide(cluster.view()), Wait)
    cluster.assert_consistent()
    agreed = {(generation, step) for generation, step, _ in cluster.agreed}
    assert len(agreed) == len(dict(agreed)), "an agreement is never contradicted"
