from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from etcd_helpers import wait_until
from stand_in_agent import StandInAgent

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import FencedError, NameTakenError
from etc_agent.rendezvous.etcd.values import Delete
from etc_agent.rendezvous.fenced import FencedWriter
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.membership import Membership
from etc_agent.rendezvous.private.server import EtcdServer

TTL_S = 2


@pytest.fixture
def agents(shared_etcd: EtcdServer, keys: JobKeys) -> Iterator[list[StandInAgent]]:
    agents = [StandInAgent.start(shared_etcd.endpoint, keys, name, name, ttl_s=TTL_S) for name in "abc"]
    yield agents
    for agent in agents:
        agent.stop()


def leader_of(agents: list[StandInAgent]) -> StandInAgent:
    wait_until(lambda: any(agent.election.is_leader for agent in agents))
    (leader,) = [agent for agent in agents if agent.election.is_leader]
    return leader


def test_every_agent_sees_the_same_members(agents: list[StandInAgent], keys: JobKeys) -> None:
    for agent in agents:
        wait_until(lambda agent=agent: set(agent.mirror.snapshot().under(keys.nodes_prefix)) == set("abc"))
    agents[0].membership.update("new")
    for agent in agents:
        assert agent.mirror.wait_for(lambda seen: seen[keys.node("a")].text == "new", 5)
    agents[0].membership.close()
    for agent in agents:
        assert agent.mirror.wait_for(lambda seen: keys.node("a") not in seen, 5)


def test_a_name_in_use_is_refused_and_its_holder_stays(
    agents: list[StandInAgent], keys: JobKeys, client: EtcdClient
) -> None:
    with pytest.raises(NameTakenError, match="registered by another instance"):
        Membership(client, keys.node("a"), "impostor")
    found = client.get(keys.node("a"))
    assert found is not None
    assert found.text == "a"


def test_a_lost_lease_is_replaced_with_the_newest_value(client: EtcdClient, keys: JobKeys) -> None:
    again = threading.Event()
    membership = Membership(client, keys.node("a"), "1", ttl_s=TTL_S, on_registered=again.set)
    lost = membership.lease
    client.revoke_lease(lost.id)
    membership.update("2")
    assert again.wait(10)
    found = client.get(keys.node("a"))
    assert found is not None
    assert (found.text, found.lease) == ("2", membership.lease.id)
    assert lost.is_lost
    assert membership.is_registered
    membership.close()
    assert client.get(keys.node("a")) is None


def test_a_name_taken_while_the_lease_was_lost_is_reported(client: EtcdClient, keys: JobKeys) -> None:
    taken = threading.Event()
    membership = Membership(client, keys.node("a"), "1", ttl_s=TTL_S, on_name_taken=taken.set)
    client.revoke_lease(membership.lease.id)
    client.put(keys.node("a"), "someone else")
    assert taken.wait(10)
    assert not membership.is_registered
    membership.close()


def test_one_agent_leads_and_its_death_hands_the_lead_on(agents: list[StandInAgent]) -> None:
    leader = leader_of(agents)
    others = [agent for agent in agents if agent is not leader]
    first = leader.election.create_revision
    assert first is not None
    leader.election.close()
    leader.membership.close()
    second = leader_of(others).election.create_revision
    assert second is not None
    assert second > first
    assert not leader.election.is_leader


def test_a_leader_that_loses_its_lease_stops_leading_at_once(agents: list[StandInAgent], client: EtcdClient) -> None:
    leader = leader_of(agents)
    mandate = leader.election.mandate
    assert mandate is not None
    client.revoke_lease(mandate.lease)
    wait_until(lambda: leader.election.mandate != mandate)
    assert leader_of(agents).election.mandate != mandate


def test_resigning_hands_the_lead_on_and_keeps_the_membership(agents: list[StandInAgent], keys: JobKeys) -> None:
    leader = leader_of(agents)
    leader.election.resign()
    leader.election.resign()
    assert leader_of(agents) is not leader
    assert leader.membership.is_registered


def test_the_leader_writes_several_keys_at_one_revision(
    agents: list[StandInAgent], keys: JobKeys, client: EtcdClient
) -> None:
    mandate = leader_of(agents).election.mandate
    assert mandate is not None
    writer = FencedWriter(client, mandate, keys.current)
    client.put(keys.scale, "4")
    revision = writer.write({keys.current: "1", keys.generation(1): "g"}, deletes=[Delete(keys.scale)])
    written = [kv for kv in client.get_prefix(keys.root)[0] if kv.mod_revision == revision]
    assert [kv.key for kv in written] == [keys.current, keys.generation(1)]
    assert client.get(keys.scale) is None
    assert writer.current is not None
    assert writer.current.mod_revision == revision
    assert writer.write({keys.status: "s"}) > revision
    assert writer.write({keys.current: "2"}) > revision


def test_a_former_leader_writes_nothing(agents: list[StandInAgent], keys: JobKeys, client: EtcdClient) -> None:
    leader = leader_of(agents)
    mandate = leader.election.mandate
    assert mandate is not None
    writer = FencedWriter(client, mandate, keys.current)
    writer.write({keys.current: "1"})
    leader.election.resign()
    successor = leader_of(agents).election.mandate
    assert successor is not None
    before = client.get_prefix(keys.root)[0]
    for puts in ({keys.current: "evil"}, {keys.status: "evil"}):
        with pytest.raises(FencedError, match="not the leader any more"):
            writer.write(puts)
    with pytest.raises(FencedError):
        FencedWriter(client, mandate, keys.current)
    assert client.get_prefix(keys.root)[0] == before
    FencedWriter(client, successor, keys.current).write({keys.current: "2"})


def test_a_writer_that_does_not_know_current_writes_nothing(
    agents: list[StandInAgent], keys: JobKeys, client: EtcdClient
) -> None:
    mandate = leader_of(agents).election.mandate
    assert mandate is not None
    writer = FencedWriter(client, mandate, keys.current)
    client.put(keys.current, "changed by hand")
    with pytest.raises(FencedError, match="has changed under this writer"):
        writer.write({keys.current: "1"})
    writer.reload()
    writer.write({keys.current: "1"})
