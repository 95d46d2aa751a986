"""Where other nodes are told to reach this one, on this very machine's interfaces."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from etc_agent.agent.interface import gloo_variables
from etc_agent.agent.safety.contact_point import ContactPoint
from etc_agent.agent.safety.peer_status import Speaker
from etc_agent.agent.stores import Stores
from etc_agent.errors import EtcError
from etc_agent.reconfig.fencing import PeerStatus
from etc_agent.rendezvous.addresses import LOOPBACK, listen_at, node_name, reachable_address
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.ports import PortRange
from etc_agent.torch_store import serve_store


def outward(family: socket.AddressFamily, target: str) -> str | None:
    """This machine's address on the way to `target`, if it has a way there."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def has_ipv6() -> bool:
    listener = listen_at("::1")
    if listener is not None:
        listener.close()
    return listener is not None


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback address")


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose own name does not resolve."""
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")


def test_the_address_on_the_way_to_etcd_is_published() -> None:
    address = outward(socket.AF_INET, "198.51.100.7")
    if address is None:
        pytest.skip("this machine has no network")
    assert reachable_address(["198.51.100.7:2379"]) == address


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "[::1]:1", "unix:///tmp/etcd.sock:0", "nowhere.invalid:1"])
def test_with_an_etcd_on_this_host_the_way_outside_counts_and_loopback_comes_last(endpoint: str) -> None:
    ways = [outward(socket.AF_INET, "198.51.100.1"), outward(socket.AF_INET6, "2001:db8::1")]
    assert reachable_address([endpoint]) == next(filter(None, ways), LOOPBACK)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", pytest.param("::1", marks=needs_ipv6)])
def test_a_store_listens_at_its_address_and_nowhere_else(host: str) -> None:
    store = serve_store(host, 10.0)
    client = dist.TCPStore(host, store.port, is_master=False)
    client.set("a", "b")
    assert store.get("a") == b"b"
    for other in {"127.0.0.1", "127.0.0.3"} - {host}:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, store.port), 5.0)


def test_a_range_of_ports_bounds_where_an_agent_listens() -> None:
    free = listen_at("127.0.0.1")
    assert free is not None
    first = free.getsockname()[1]
    ports = PortRange(first, first + 3)
    stores = Stores("127.0.0.1", ports)
    point = ContactPoint("127.0.0.1", Speaker("job", "a"), lambda: PeerStatus(0.0, 1.0), {}.__setitem__, ports)
    try:
        taken = {first, stores.port, point.port}
        assert len(taken) == 3
        assert taken <= set(ports)
        assert stores.open(ports) in ports
        with pytest.raises(EtcError, match="--port-range: no port of"):
            stores.open(ports)
    finally:
        point.close()
        free.close()


def test_a_port_of_the_range_whose_last_connection_winds_down_is_used_again() -> None:
    listener = listen_at("127.0.0.1")
    assert listener is not None
    port = listener.getsockname()[1]
    caller = socket.create_connection(("127.0.0.1", port), 5.0)
    accepted, _ = listener.accept()
    accepted.close()  # this side closes first, and the kernel keeps the port busy for a minute
    assert caller.recv(1) == b""
    caller.close()
    listener.close()
    again = listen_at("127.0.0.1", PortRange(port, port))
    assert again is not None
    again.close()


@pytest.mark.parametrize("text", ["", "29500", "29510-29500", "0-100", "65000-70000", "29500-29503", "a-b"])
def test_what_is_no_range_of_ports_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"write it like|each etc-run on a host needs"):
        PortRange.parse(text)
    assert str(PortRange.parse("29500-29599")) == "29500-29599"


def test_an_address_that_this_host_does_not_have_means_every_one() -> None:
    assert listen_at("203.0.113.9") is None
    store = serve_store("203.0.113.9", 10.0)
    socket.create_connection(("127.0.0.1", store.port), 5.0).close()


@pytest.mark.parametrize(
    ("address", "name"),
    [("::1", "0::1"), ("fe80::2%eth0", "fe80::2-eth0"), ("10.0.0.1", "10.0.0.1"), ("gpu_1", "gpu_1"), ("-x", "0-x")],
)
def test_every_address_gives_a_name_that_can_be_part_of_a_key(address: str, name: str) -> None:
    assert node_name(address) == name
    assert JobKeys("job").node(name)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize(("family", "target"), [(socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1")])
def test_gloo_is_told_the_interface_that_has_the_address(
    family: socket.AddressFamily, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    address = outward(family, target)
    if address is None:
        pytest.skip("this machine has no network of this family")
    (name,) = gloo_variables(address).values()
    assert name in {known for _, known in socket.if_nameindex()}
    assert gloo_variables("127.0.0.1") == gloo_variables("::1") == {}
