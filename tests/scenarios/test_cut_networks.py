"""Nodes with a network of their own each, whose cables are pulled while the job trains."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from network import Host, Network
from running import TINY_JOB, Etcd, EtcRun, etcd_leader, steps_of, wait_for_step, wait_until

from etc_agent.rendezvous.private.listen import OnPort
from etc_agent.rendezvous.private.server import EtcdServer

Cleanup = Callable[[EtcRun], EtcRun]
LEASE_S = 4

NO_NETEM = "qdisc kind is unknown"
"""What tc says of a kernel without it."""


@pytest.fixture
def network(make_network: Callable[[int], Network]) -> Network:
    return make_network(3)


@pytest.fixture
def etcd_server(network: Network) -> Iterator[EtcdServer]:
    """On the switch itself: every host reaches it by its own cable."""
    with EtcdServer(listen=OnPort(network.gateway)) as server:
        yield server


def node(tmp_path: Path, server: EtcdServer, host: Host) -> EtcRun:
    return EtcRun(
        "--nnodes", "1:3", "--nproc-per-node", 1, "--rdzv-id", "job", "--rdzv-conf", f"lease_s={LEASE_S}",
        "--etcd-endpoints", server.endpoint, "--local-addr", host.address, TINY_JOB, tmp_path, 100_000, 0.05,
        cwd=tmp_path, prefix=host.prefix,
    )


def connects(host: Host, timeout_s: float) -> float | None:
    """The seconds that a connection from the machine to `host` takes to be refused; None where nobody answers."""
    begin = time.monotonic()
    with socket.socket() as probe:
        probe.settimeout(timeout_s)
        try:
            probe.connect((host.address, 9))
        except ConnectionRefusedError:
            return time.monotonic() - begin
        except OSError:
            pass
    return None


def test_a_cable_can_be_pulled_and_plugged_in_again(network: Network) -> None:
    host, other = network.hosts[:2]
    network.cut(host)
    assert connects(host, 0.3) is None
    assert connects(other, 5.0) is not None
    network.heal(host)
    wait_until(lambda: connects(host, 5.0) is not None, "an answer")


def test_a_cable_can_be_made_slow(network: Network) -> None:
    host, other = network.hosts[:2]
    try:
        network.delay(host, 1000)
    except OSError as error:
        if NO_NETEM not in str(error):
            raise
        pytest.skip(f"this kernel has no netem: {error}")
    taken_s = [connects(one, 5.0) for one in (host, other)]
    assert (taken_s[0] or 0) >= 1
    assert (taken_s[1] or 1) < 1


def test_the_node_of_leader_store_and_rank_0_is_cut_off_and_done_without_and_comes_back(
    tmp_path: Path, cleanup: Cleanup, network: Network, etcd_server: EtcdServer
) -> None:
    etcd = Etcd(etcd_server.endpoint, "job")
    runs = [cleanup(node(tmp_path, etcd_server, network.hosts[0]))]
    wait_for_step(tmp_path, 2)
    runs += [cleanup(node(tmp_path, etcd_server, host)) for host in network.hosts[1:]]
    wait_until(lambda: len((etcd.get("status") or {}).get("nodes", ())) == 3, "three nodes")
    before, cut = etcd.get("current")["committed"], network.hosts[0]
    generation = etcd.get(f"generations/{before}")
    assert etcd_leader(etcd) == cut.address
    assert generation["placement"][0] == f"{cut.address}/0"
    assert generation["store"].startswith(f"{cut.address}:")

    (rank_0,) = {line["pid"] for line in steps_of(tmp_path) if line["rank"] == 0}

    network.cut(cut)
    wait_until(lambda: any(line["generation"] > before for line in steps_of(tmp_path)), "steps without it")
    assert not is_running(rank_0), "the node that is cut off has stopped its worker by itself"
    new = [line for line in steps_of(tmp_path) if line["generation"] > before]
    assert {line["env_world_size"] for line in new} == {2}
    assert f"node {cut.address} was lost" in etcd.get(f"generations/{new[0]['generation']}")["reason"]
    begun = min(line["time"] for line in new)
    late = [line for line in steps_of(tmp_path) if line["generation"] <= before and line["time"] > begun]
    assert not late, "two generations never train at once"

    network.heal(cut)
    wait_until(lambda: len((etcd.get("status") or {}).get("nodes", ())) == 3, "the node that was cut off, back again")
    assert all(run.process.poll() is None for run in runs), "no agent has ended"
    last = max(line["step"] for line in steps_of(tmp_path) if line["generation"] > before)
    wait_until(lambda: any(line["step"] > last + 5 for line in steps_of(tmp_path)[-50:]), "steps on three nodes")
    for run in runs:
        run.send(signal.SIGTERM)
    assert {run.wait() for run in runs} <= {0, 143}
    for run in runs:
        run.assert_nothing_left()


def is_running(pid: int) -> bool:
    """Whether the process is there, and not only what is left of it until its parent looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
