"""No two generations train at once, whatever is cut, frozen or slow: told on the simulated cluster, second by second.

Each story is told with the rule that etc-run once had, too: the simulated cluster has to find what was wrong with it.
"""

from __future__ import annotations

import pytest

from etc_agent.reconfig.fencing import FOR_EVER, Evidence, Fencing, PeerStatus
from etc_agent.reconfig.known.view import Policy
from etc_agent.simulator.cluster.agent import rule
from etc_agent.simulator.cluster.workers import Model
from etc_agent.simulator.cluster.world import ETCD, TrainedAtOnce, World

FENCING = Fencing(10.0)


def policy(min_nodes: int = 1, max_nodes: int = 3) -> Policy:
    return Policy(
        min_nodes, max_nodes, num_slots=2, max_restarts=1000, alike_failures=0, start_s=5.0, prepare_s=20.0,
        switch_s=40.0, retry_s=1.0, lost_s=FENCING.trust_s, fence_s=FENCING.fence_s,
    )


class OnceWorld(World):
    """As it was: agents asked whether a port accepts, which the kernel of a stopped one does too, and nothing else."""

    def ask(self, name: str, other: str, status: PeerStatus) -> PeerStatus | None:
        agent = self.agents.get(other)
        if agent is None or agent.has_left or (name, other) in self.cut:
            return None
        return PeerStatus(self.now, agent.contact.followed_s(self.now))


def once(evidence: Evidence, fencing: Fencing, now: float) -> float:
    """The rule that there was: stay while more than half of all nodes accept connections, or steps need others."""
    if not evidence.nodes:
        return FOR_EVER
    answered = [node for node in evidence.nodes if node in evidence.statuses]
    recent = [node for node in answered if now - evidence.statuses[node].at < fencing.steps_s]
    if 2 * (len(recent) + 1) > len(evidence.nodes) + 1:
        return max(evidence.lease_until, now + fencing.steps_s)
    return max(evidence.lease_until, evidence.stepped_at + fencing.steps_s if evidence.companions else 0.0)


def most(evidence: Evidence, fencing: Fencing, now: float) -> float:
    """The same, except that one peer that hears etcd means that the node is cut off."""
    if any(status.hears_etcd and now - status.at < fencing.steps_s for status in evidence.statuses.values()):
        return evidence.lease_until
    return once(evidence, fencing, now)


def begun(world: World, *nodes: str) -> World:
    """A job that trains on as many of `nodes` as it may."""
    for node in nodes:
        world.join(node)
        world.run(1.0)
    world.run_until(lambda: bool(world.trained) and world.trains(), "training", 60.0)
    world.run(20.0)
    return world


def job_on_a(world: World) -> World:
    """It trains on node a alone, and node b is a spare."""
    world = begun(world, "a", "b")
    assert world.committed.nodes == ("a",)
    return world


# ---- node a loses etcd, and nothing else ----------------------------------------------------------------------


def test_a_node_that_alone_loses_etcd_stops_before_the_spare_goes_on() -> None:
    world = job_on_a(World(policy(max_nodes=1), FENCING))
    world.split("a", ETCD)
    world.run(60.0)
    assert world.committed.nodes == ("b",)
    assert world.trains()


def test_the_rule_of_once_let_both_train() -> None:
    world = job_on_a(OnceWorld(policy(max_nodes=1), FENCING, fencing_rule=once))
    world.split("a", ETCD)
    with pytest.raises(TrainedAtOnce):
        world.run(60.0)


def test_it_stops_too_where_the_spare_cannot_be_reached_or_its_agent_is_stopped() -> None:
    for trouble in ("cut", "one way", "frozen"):
        world = job_on_a(World(policy(max_nodes=1), FENCING))
        world.split("a", ETCD)
        if trouble == "frozen":
            world.agents["b"].is_frozen = True
        else:
            world.cut |= {("a", "b")} if trouble == "one way" else {("a", "b"), ("b", "a")}
        world.run(30.0)
        assert ("a", 0) not in world.running()


def test_while_etcd_is_away_from_all_of_them_the_job_trains_on_however_long() -> None:
    world = begun(World(policy(), FENCING), "a", "b", "c")
    trained = world.etcd.records.current.committed
    world.etcd.is_up = False
    world.run(500.0)
    assert world.trained[trained][1] == world.now
    world.etcd.start_again(world.now)
    world.run(60.0)
    assert world.trained[trained][1] == world.now, "nobody was cut off, and nobody is taken to have been"


# ---- more than two nodes --------------------------------------------------------------------------------------


def larger_part_without_etcd(world: World) -> World:
    """The job trains on a and b; c hears etcd, and they do not hear c."""
    world.join("a")
    world.join("b")
    world.join("c")
    world.run(20.0)
    assert set(world.committed.nodes) == {"a", "b"}
    for node in ("a", "b"):
        world.split(node, ETCD)
        world.split(node, "c")
    return world


def test_the_larger_part_of_the_nodes_stops_where_etcd_is_on_the_other_side() -> None:
    world = larger_part_without_etcd(World(policy(max_nodes=2), FENCING))
    world.run(60.0)
    assert world.committed.nodes == ("c",)
    assert world.trains()


def test_a_majority_would_train_on_beside_the_smaller_part() -> None:
    world = larger_part_without_etcd(World(policy(max_nodes=2), FENCING, fencing_rule=most))
    with pytest.raises(TrainedAtOnce):
        world.run(60.0)


def test_a_node_that_came_after_the_cut_asks_before_it_goes_on() -> None:
    world = begun(World(policy(max_nodes=1), FENCING), "a")
    world.split("a", ETCD)
    world.run(3.0)
    world.join("b")
    world.run(60.0)
    assert world.committed.nodes == ("b",)
    assert world.trains()


# ---- agents that are stopped, and slow ones -------------------------------------------------------------------


def test_the_guardian_of_a_stopped_agent_ends_its_workers_before_the_others_go_on() -> None:
    for nodes in (("a", "b"), ("a",)):
        world = begun(World(policy(max_nodes=1), FENCING), *nodes)
        world.agents["a"].is_frozen = True
        world.run(1.0)
        if "b" not in nodes:
            world.join("b")
        world.run(60.0)
        assert world.running() == {("b", 0), ("b", 1)}


def test_slow_renewals_cost_no_worker() -> None:
    world = begun(World(policy(), FENCING), "a", "b")
    trained = world.etcd.records.current.committed
    world.agents["a"].renewal_s = 2.0
    world.run(200.0)
    assert world.trained[trained][1] == world.now


# ---- no cut at all --------------------------------------------------------------------------------------------


def test_a_plain_job_that_moves_to_another_node_starts_there_when_it_has_ended_here() -> None:
    world = job_on_a(World(policy(max_nodes=1), FENCING, Model(in_session=False, stop_s=8.0)))
    world.agents["a"].drain()
    world.run(60.0)
    assert world.committed.nodes == ("b",)
    assert world.trains()
    ends = [last for _, last in sorted(world.trained.values())][:-1]
    assert max(ends) < world.trained[world.committed.id][0]


def test_the_real_rule_is_the_default() -> None:
    assert World(policy(), FENCING).fencing_rule is rule
