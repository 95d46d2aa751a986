"""The network interface that the workers' gloo groups use."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_IPV6_TABLE = Path("/proc/net/if_inet6")


def gloo_variables(address: str) -> dict[str, str]:
    """The environment variable with which a worker's gloo listens on `address`, where other nodes reach this one.

    By default gloo listens on the address that this host's name resolves to, often a loopback address that other nodes
    cannot reach. Empty where that address is right, where the user has set the variable, or where no interface has it.
    """
    if _VARIABLE in os.environ:
        return {}
    wanted = _resolve(address)
    if wanted is None or wanted.is_loopback or wanted == _resolve(socket.gethostname()):
        return {}
    name = _interface_of(wanted)
    return {_VARIABLE: name} if name else {}


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _resolve(host: str) -> Address | None:
    try:
        target = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4]
    except (OSError, UnicodeError):
        return None
    return ipaddress.ip_address(str(target[0]).partition("%")[0])


def _interface_of(address: Address) -> str | None:
    """The interface that has this address."""
    if isinstance(address, ipaddress.IPv4Address):
        return _ipv4_interface(address)
    table = _IPV6_TABLE.read_text().splitlines() if _IPV6_TABLE.exists() else []
    known = {fields[0]: fields[-1] for fields in map(str.split, table)}
    return known.get(address.packed.hex())


def _ipv4_interface(address: ipaddress.IPv4Address) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # this interface has no address
                continue
            if answer[20:24] == address.packed:
                return name
    return None
