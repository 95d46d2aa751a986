"""What etcd, its network and time can do to us."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_helpers import Wire, etcd_cluster, freeze, make_certificates, run_etcdctl, wait_until

from etc_agent.rendezvous.election import Election, Mandate
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import AmbiguousError, EtcdAuthError, EtcdError, EtcdUnavailable, FencedError
from etc_agent.rendezvous.etcd.transport import Tls
from etc_agent.rendezvous.etcd.values import Put
from etc_agent.rendezvous.fenced import FencedWriter
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.membership import Membership
from etc_agent.rendezvous.mirror import Mirror
from etc_agent.rendezvous.private.listen import OnPort
from etc_agent.rendezvous.private.server import EtcdServer


@pytest.fixture
def wire(shared_etcd: EtcdServer) -> Iterator[Wire]:
    with Wire(shared_etcd.endpoint) as wire:
        yield wire


@pytest.fixture
def wired(wire: Wire) -> Iterator[EtcdClient]:
    """A client whose cable is `wire`."""
    with EtcdClient([wire.endpoint], timeout_s=3.0) as client:
        yield client


def test_a_crash_of_etcd_loses_no_event_no_lease_and_no_member(etcd: EtcdServer, keys: JobKeys) -> None:
    ttl_s = 5  # etcd has this long to answer again after its restart, on a busy machine
    with EtcdClient([etcd.endpoint]) as client:
        mirror = Mirror(client, keys.root)
        membership = Membership(client, keys.node("a"), "a", ttl_s=ttl_s)
        lease = membership.lease
        assert mirror.wait_for(lambda snapshot: membership.key in snapshot, 10)
        etcd.kill()
        wait_until(lambda: not membership.is_registered and not mirror.is_connected)
        assert not lease.is_lost  # nobody has said so
        assert keys.node("a") in mirror.snapshot()
        etcd.start_again()
        client.put(keys.scale, "8")
        assert mirror.wait_for(lambda seen: keys.scale in seen, 10)
        wait_until(lambda: membership.is_registered and mirror.is_connected)
        assert membership.lease is lease
        assert mirror.snapshot()[keys.node("a")].version == 1
        membership.close()
        mirror.close()


def test_a_hung_etcd_is_noticed_and_forgiven(etcd: EtcdServer, keys: JobKeys) -> None:
    with EtcdClient([etcd.endpoint], timeout_s=2.0) as client:
        mirror = Mirror(client, keys.root)
        wait_until(lambda: mirror.is_connected)
        freeze(etcd.pid)
        begin = time.monotonic()
        with pytest.raises(EtcdUnavailable):
            client.get(keys.scale)
        assert time.monotonic() - begin < 6
        wait_until(lambda: not mirror.is_connected, 10)
        os.kill(etcd.pid, signal.SIGCONT)
        wait_until(lambda: mirror.is_connected, 10)
        client.put(keys.scale, "8")
        assert mirror.wait_for(lambda seen: keys.scale in seen, 5)
        mirror.close()


def test_a_mirror_lists_again_when_what_it_missed_is_compacted(
    wire: Wire, wired: EtcdClient, client: EtcdClient, keys: JobKeys
) -> None:
    client.put(keys.node("gone"), "")
    changes: list[int] = []
    mirror = Mirror(wired, keys.root, lambda: changes.append(1))
    wait_until(lambda: mirror.is_connected)
    wire.cut()
    client.delete(keys.node("gone"))
    client.put(keys.scale, "1")
    client.compact(client.put(keys.scale, "2"))
    wire.mend()
    assert mirror.wait_for(lambda seen: keys.scale in seen, 10)
    assert {key: kv.text for key, kv in mirror.snapshot().items()} == {keys.scale: "2"}
    assert changes == [1]
    client.put(keys.scale, "3")
    assert mirror.wait_for(lambda seen: seen[keys.scale].text == "3", 5)
    mirror.close()


def test_a_mirror_lists_again_when_etcd_has_lost_its_data(
    wire: Wire, wired: EtcdClient, client: EtcdClient, etcd: EtcdServer, keys: JobKeys
) -> None:
    for number in range(5):
        client.put(keys.scale, f"{number}")
    mirror = Mirror(wired, keys.root)
    with EtcdClient([etcd.endpoint]) as fresh:
        fresh.put(keys.job, "j")
        wire.lead_to(etcd.endpoint)
        assert mirror.wait_for(lambda seen: set(seen) == {keys.job}, 10)
        fresh.put(keys.scale, "9")
        assert mirror.wait_for(lambda seen: keys.scale in seen, 5)
    mirror.close()


def test_a_dead_link_is_noticed_within_seconds(
    wire: Wire, wired: EtcdClient, client: EtcdClient, keys: JobKeys
) -> None:
    mirror = Mirror(wired, keys.root)
    wait_until(lambda: mirror.is_connected)
    wire.loses_answers = wire.loses_requests = True
    client.put(keys.scale, "while cut off")
    assert wait_until(lambda: not mirror.is_connected, 30) < 12
    wire.mend()
    assert mirror.wait_for(lambda seen: keys.scale in seen, 10)
    mirror.close()


def test_an_etcd_with_half_a_second_of_round_trip_is_slow_and_nothing_else(
    wire: Wire, wired: EtcdClient, client: EtcdClient, keys: JobKeys
) -> None:
    wire.delay_s = 0.25  # each way
    mirror = Mirror(wired, keys.root)
    membership = Membership(wired, keys.node("a"), "a", ttl_s=5)
    election = Election(wired, mirror, keys.leader, "a", lambda: membership.lease)
    wait_until(lambda: election.is_leader)
    since = mirror.connected_for_s
    assert wired.transact([], [Put(keys.scale, "1")]).succeeded
    assert mirror.wait_for(lambda seen: keys.scale in seen, 5)
    wait_until(lambda: mirror.connected_for_s >= since + 5)  # longer than the lease and any heartbeat
    assert election.is_leader
    assert not membership.lease.is_lost
    election.close()
    membership.close()
    mirror.close()


def test_a_node_cut_off_for_longer_than_its_lease_registers_again(
    wire: Wire, wired: EtcdClient, client: EtcdClient, keys: JobKeys
) -> None:
    membership = Membership(wired, keys.node("a"), "a", ttl_s=1)
    first = membership.lease
    wire.cut()
    wait_until(lambda: client.get(keys.node("a")) is None)
    assert not membership.is_registered
    wire.mend()
    wait_until(lambda: membership.is_registered)
    assert client.get(keys.node("a")) is not None
    assert membership.lease is not first
    membership.close()


def test_a_leader_that_is_cut_off_knows_it_before_another_leads(
    wire: Wire, wired: EtcdClient, client: EtcdClient, keys: JobKeys
) -> None:
    def elect(client: EtcdClient, name: str) -> tuple[Mirror, Membership, Election]:
        mirror = Mirror(client, keys.root)
        membership = Membership(client, keys.node(name), name, ttl_s=2)
        return mirror, membership, Election(client, mirror, keys.leader, name, lambda: membership.lease)

    old = elect(wired, "old")
    wait_until(lambda: old[2].is_leader)
    new = elect(client, "new")
    wire.loses_answers = wire.loses_requests = True
    while not new[2].is_leader:
        old_leads = old[2].is_leader
        time.sleep(0.001)
        assert not (old_leads and new[2].is_leader)
    assert not old[2].is_leader
    wire.mend()
    wait_until(lambda: old[1].is_registered)
    assert not old[2].is_leader
    for mirror, membership, election in (old, new):
        election.close()
        membership.close()
        mirror.close()


@pytest.fixture
def mandate(client: EtcdClient, keys: JobKeys) -> Mandate:
    return Mandate(keys.leader, client.put(keys.leader, "me"), 0)


def test_a_transaction_whose_answer_is_lost_is_said_to_be_ambiguous(
    wire: Wire, wired: EtcdClient, client: EtcdClient, keys: JobKeys
) -> None:
    wired.get(keys.scale)
    wire.loses_answers = True
    with pytest.raises(AmbiguousError, match="may or may not have been applied"):
        wired.transact([], [Put(keys.scale, "1")])
    assert client.get(keys.scale) is not None


@pytest.mark.parametrize("is_current_written", [True, False])
@pytest.mark.parametrize("lost", ["loses_answers", "loses_requests"])
def test_a_write_of_the_leader_lands_once_whatever_is_lost(
    wire: Wire,
    wired: EtcdClient,
    client: EtcdClient,
    keys: JobKeys,
    mandate: Mandate,
    lost: str,
    is_current_written: bool,
) -> None:
    writer = FencedWriter(wired, mandate, keys.current)
    writer.write({keys.current: "0"})
    puts = {keys.generation(1): "g"} | ({keys.current: "1"} if is_current_written else {})
    setattr(wire, lost, True)
    mending = mend_soon(wire)
    revision = writer.write(puts, timeout_s=10)
    mending.join()
    written = client.get(keys.generation(1))
    assert written is not None
    assert (written.mod_revision, written.version) == (revision, 1)
    assert writer.current == client.get(keys.current)
    writer.write({keys.current: "2"})


def mend_soon(wire: Wire) -> threading.Timer:
    timer = threading.Timer(0.5, wire.mend)
    timer.start()
    return timer


def test_a_write_whose_answer_is_lost_and_is_then_fenced_says_so(
    wire: Wire, wired: EtcdClient, client: EtcdClient, keys: JobKeys, mandate: Mandate
) -> None:
    writer = FencedWriter(wired, mandate, keys.current)
    wire.loses_requests = True
    client.delete(keys.leader)
    client.put(keys.leader, "another")
    mending = mend_soon(wire)
    with pytest.raises(FencedError, match="not the leader any more"):
        writer.write({keys.current: "evil"}, timeout_s=10)
    mending.join()
    assert client.get(keys.current) is None


def test_a_cluster_of_three_outlives_its_leader_and_a_member_that_hangs(keys: JobKeys) -> None:
    with etcd_cluster(3) as servers, EtcdClient([server.endpoint for server in servers], timeout_s=10) as client:
        mirror = Mirror(client, keys.root)
        membership = Membership(client, keys.node("a"), "a", ttl_s=5)
        lease = membership.lease
        freeze(servers[0].pid)
        for number in range(3):
            client.put(keys.scale, f"{number}")
        assert mirror.wait_for(lambda seen: keys.scale in seen and seen[keys.scale].text == "2", 15)
        os.kill(servers[0].pid, signal.SIGCONT)
        for victim in servers:  # the leader is among them
            victim.kill()
            revision = client.put(keys.scale, "")
            assert mirror.wait_for(lambda seen, revision=revision: seen.revision >= revision, 15)
            victim.start_again()
        assert membership.lease is lease
        membership.close()
        mirror.close()


def test_tls_and_a_password_hold_over_a_restart_that_voids_the_token(
    tmp_path: Path, keys: JobKeys, capfd: pytest.CaptureFixture[str]
) -> None:
    server_tls, client_tls = make_certificates(tmp_path)
    with EtcdServer(listen=OnPort(tls=server_tls)) as server:
        etcdctl = [
            *("etcdctl", f"--endpoints=https://{server.endpoint}", f"--cacert={client_tls.ca}"),
            *(f"--cert={client_tls.certificate}", f"--key={client_tls.key}"),
        ]
        for command in ("user add root:secret", "user grant-role root root", "role add trainer", "user add bob:word",
                        f"role grant-permission --prefix trainer readwrite {keys.root}", "user grant-role bob trainer",
                        "auth enable"):  # fmt: skip
            run_etcdctl([*etcdctl, *command.split()])
        with EtcdClient([server.endpoint], tls=client_tls, user="bob", password="word") as client:
            mirror = Mirror(client, keys.root)
            membership = Membership(client, keys.node("a"), "a", ttl_s=5)
            server.kill()
            server.start_again()
            client.put(keys.scale, "8")
            assert mirror.wait_for(lambda seen: keys.scale in seen, 15)
            assert not membership.lease.is_lost
            with pytest.raises(EtcdAuthError, match="does not let user 'bob' do this"):
                client.put("/elsewhere", "")
            membership.close()
            mirror.close()
        for login, message in (
            ({"user": "bob", "password": "wrong"}, "does not accept the password of user 'bob'"),
            ({}, "a client that names no user|wants a user and a password"),
        ):
            with EtcdClient([server.endpoint], tls=client_tls, **login) as client:
                with pytest.raises(EtcdAuthError, match=message) as caught:
                    client.get(keys.scale)
                assert "wrong" not in str(caught.value).split("password")[0]
        for tls, message in (
            (None, "it may speak TLS, which we were not told to use"),
            (Tls(), "not signed by the CA that we were told to trust"),
            (Tls(client_tls.ca), "does not accept our TLS client certificate, or misses one"),
        ):
            with (
                EtcdClient([server.endpoint], tls=tls, timeout_s=0.5) as client,
                pytest.raises(EtcdUnavailable, match=message),
            ):
                client.get(keys.scale)
    assert "GRPC_VERBOSITY" not in os.environ
    assert capfd.readouterr().err == ""


def test_a_certificate_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EtcdError, match=r"cannot read the etcd CA certificate file .*nowhere\.pem: No such file"):
        EtcdClient(["h:1"], tls=Tls(tmp_path / "nowhere.pem"))
    with pytest.raises(EtcdError, match="needs a certificate file and a key file"):
        Tls(certificate=tmp_path / "c.pem")
