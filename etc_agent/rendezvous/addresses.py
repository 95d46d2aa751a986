"""The address at which other nodes reach this one, and listening on that address only."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Iterable, Iterator

from etc_agent.errors import EtcError
from etc_agent.rendezvous.etcd.errors import EtcdError
from etc_agent.rendezvous.etcd.transport import parse_endpoint
from etc_agent.rendezvous.ports import ANY_PORT, PortRange

LOOPBACK = "127.0.0.1"
_OUTSIDE = ("198.51.100.1:9", "[2001:db8::1]:9")
"""Addresses reserved for documentation (RFC 5737, RFC 3849): the route to them is the route out of this host."""
_BACKLOG = 4096


def reachable_address(endpoints: Iterable[str]) -> str:
    """The address of the interface that leads to etcd at `endpoints`, since the other nodes reach etcd too.

    If etcd runs on this host: the address that this host's name resolves to, else that of the interface which leads
    outside; loopback addresses come last. A name is never returned, since other hosts may not be able to resolve it.
    """
    found = (address for address in _candidates(endpoints) if not _is_loopback(address))
    return next(found, LOOPBACK)


def refuse_unknown(host: str, where: str) -> None:
    """Refuses a name, given at `where`, that this host cannot resolve: its workers would wait there in vain.

    Raises:
        EtcError: what was given, and what to give.
    """
    if not _resolved(host):
        raise EtcError(
            f"{where}: {host!r} is no address, and no name that this host can resolve; give the IPv4 or IPv6 "
            "address at which the other nodes reach this one, or leave it out"
        )


def _candidates(endpoints: Iterable[str]) -> Iterator[str]:
    yield from filter(None, map(_source_towards, endpoints))
    yield from (address for _, address in _resolved(socket.gethostname()) if _is_own(address))
    yield from filter(None, map(_source_towards, _OUTSIDE))


def node_name(address: str) -> str:
    """`address` as a node name for etcd keys, in which not every character is allowed."""
    name = re.sub(r"[^A-Za-z0-9._:@-]", "-", address)[:120]
    return name if name[:1].isalnum() else f"0{name}"  # an IPv6 address may begin with a zero as well


def listen_at(host: str, ports: PortRange = ANY_PORT) -> socket.socket | None:
    """A socket that listens on the first free one of `ports` at the address that `host` resolves to; None where this
    host does not have that address (behind NAT, for example).

    Raises:
        EtcError: the host has the address, and none of the ports is free there.
    """
    for family, address in _resolved(host):
        try:
            return _listen(family, address, ports)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _all_taken(address, ports) from None
    return None


def listen_for(host: str, ports: PortRange = ANY_PORT) -> socket.socket:
    """As `listen_at`; a host that does not have the address listens at all of its addresses.

    Raises:
        EtcError: none of the ports is free.
    """
    listener = listen_at(host, ports)
    if listener is not None:
        return listener
    family, address = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")
    try:
        return _listen(family, address, ports)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _all_taken("any address", ports) from None
        raise


def _listen(family: int, address: str, ports: PortRange) -> socket.socket:
    """A socket that listens at `address`. Raises OSError: EADDRINUSE where every port is taken."""
    for port in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A port whose last connections are still winding down is free; one where somebody listens is not.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if address == "::":
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((address, port))
            listener.listen(_BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or port == ports.last:
                raise
    raise AssertionError("a range of ports is not empty")


def _all_taken(address: str, ports: PortRange) -> EtcError:
    return EtcError(f"--port-range: no port of {ports} is free at {address}; give a larger range, or another one")


def _source_towards(endpoint: str) -> str | None:
    """The address of the interface that leads to `endpoint`; None where none does, or it is no TCP endpoint."""
    if endpoint.startswith("unix:"):
        return None
    try:
        host, _, port = parse_endpoint(endpoint)[0].rpartition(":")
        family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing: it only looks up the route
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError, EtcdError):
        return None


def _resolved(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [(family, str(target[0])) for family, _, _, _, target in found]


def _is_own(address: str) -> bool:
    listener = listen_at(address)
    if listener is None:
        return False
    listener.close()
    return True


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
