"""Nodes of one job that differ: in their slots, and in their roles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etc_agent.agent.processes.environment import worker_environment
from etc_agent.control.environment import generation_variables
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Node, Slot, Topology
from etc_agent.reconfig.known.records import Outcome, Result
from etc_agent.reconfig.known.view import Policy
from etc_agent.simulator.cluster.at_rest import Cluster


def uneven(policy: Policy, **num_slots: int) -> Cluster:
    """A job whose nodes came in the order given, each with so many slots."""
    cluster = Cluster(policy)
    for name, slots in num_slots.items():
        cluster.join(name, num_slots=slots)
    cluster.run()
    return cluster


@pytest.mark.parametrize("leader_s", [1, 3], ids="the leader has {} slots".format)
def test_a_job_is_as_large_as_its_nodes_together_whichever_of_them_leads(leader_s: int) -> None:
    cluster = uneven(Policy(1, 2, num_slots=leader_s), a=1, b=3)
    assert cluster.committed.config.num_ranks == 4
    for request in ("2", "4"):
        cluster.ask(request)
        cluster.run()
        assert (cluster.replies[-1].result, cluster.committed.config.num_ranks) == (Result.DONE, int(request))


def test_a_request_beyond_the_nodes_that_are_here_is_told_how_large_each_of_them_is() -> None:
    cluster = uneven(Policy(1, 2, num_slots=1), a=1, b=3)
    cluster.ask("5")
    cluster.run()
    assert cluster.replies[-1].result is Result.REFUSED
    assert "nnodes admits at most 4 (1 + 3 slots)" in cluster.replies[-1].message


def test_a_request_waits_for_a_node_as_large_as_the_largest_that_is_here() -> None:
    cluster = uneven(Policy(1, 3, num_slots=1), a=1, b=3)
    cluster.ask("7")
    cluster.run()
    assert cluster.replies[-1].result is Result.PENDING
    cluster.join("c", num_slots=3)
    cluster.run()
    assert (cluster.replies[-1].result, cluster.committed.config.num_ranks) == (Result.DONE, 7)


def test_a_request_that_waits_for_nodes_goes_on_waiting_when_the_largest_node_goes() -> None:
    cluster = uneven(Policy(1, 3, num_slots=1), a=1, b=3)
    cluster.ask("7")
    cluster.run()
    cluster.drain("b")
    cluster.run()
    assert cluster.current.pending_scale
    del cluster.nodes["b"], cluster.workers["b"]
    cluster.join("c", num_slots=3)
    cluster.join("d", num_slots=3)
    cluster.run()
    assert (cluster.replies[-1].result, cluster.committed.config.num_ranks) == (Result.DONE, 7)


def test_the_config_to_start_with_may_need_more_than_nodes_times_the_leader_s_slots() -> None:
    cluster = uneven(Policy(2, 2, num_slots=1, initial=ParallelConfig(dp=4)), a=1, b=3)
    assert cluster.config == "PP1TP1DP4"


def test_a_config_to_start_with_that_no_node_to_come_can_make_possible_ends_the_job_with_the_reason() -> None:
    cluster = uneven(Policy(2, 2, num_slots=1, initial=ParallelConfig(dp=8)), a=1, b=3)
    assert cluster.current.outcome is Outcome.FAILED
    assert "PP1TP1DP8 needs 8 workers, but nnodes admits at most 4 (1 + 3 slots)" in cluster.current.why


def test_tp_groups_start_inside_nodes_whatever_their_sizes() -> None:
    topology = Topology((Node("a", 3), Node("b", 2), Node("c", 3)))
    slots = topology.slots_in_groups(2)
    assert set(slots) == set(topology.slots)
    groups = [{slot.node for slot in slots[at : at + 2]} for at in range(0, 8, 2)]
    assert groups[:3] == [{"a"}, {"b"}, {"c"}]
    assert topology.slots_in_groups(1) == topology.slots
    assert set(topology.slots_in_groups(4)) == set(topology.slots), "no node has room for a group"
    cluster = uneven(Policy(1, 2, num_slots=3, initial=ParallelConfig(tp=2, dp=2)), a=3, b=3)
    assert [slot.node for slot in cluster.committed.placement] == ["a", "a", "b", "b"]


class LaunchConfig:
    """What a worker's environment takes from torchrun's own settings."""

    role, max_restarts, signals_to_handle, virtual_local_rank = "trainer", 0, "SIGTERM", False


def test_role_ranks_count_by_role_as_torchelastic_s_do_before_and_after_a_change() -> None:
    cluster = Cluster(Policy(1, 3, num_slots=2))
    for name, role in {"a": "trainer", "b": "reader", "c": "trainer"}.items():
        cluster.join(name)
        cluster.nodes[name] = replace(cluster.nodes[name], role=role)
    cluster.run()
    first = cluster.committed
    cluster.ask("5")
    cluster.run()
    assert not cluster.committed.is_fresh
    for generation in (first, cluster.committed):
        roles = {"trainer": 0, "reader": 0}
        sizes = {role: sum(cluster.nodes[slot.node].role == role for slot in generation.placement) for role in roles}
        for slot in generation.placement:
            role = cluster.nodes[slot.node].role
            for environment in (generation_variables(generation, slot), started_with(generation, slot)):
                assert environment["ROLE_RANK"] == str(roles[role])
                assert environment["ROLE_WORLD_SIZE"] == str(sizes[role])
            roles[role] += 1
    assert Generation.from_json(first.to_json()) == first


def started_with(generation: Generation, slot: Slot) -> dict[str, str]:
    return worker_environment(
        generation, slot, run_id="job", launch_config=LaunchConfig, restart_count=0, control_socket="", joining=False,
        extra={},
    )
