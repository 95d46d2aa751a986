"""The network interface that the workers' gloo groups speak through."""

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
    """What a worker's environment needs so that gloo listens at `address`, where other nodes reach this one.

    By itself gloo listens where this host's name leads, often a loopback address that nobody else can reach. Empty
    where that is right, where the user has chosen, and where no interface has the address.
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
            except OSError:  # it has none
                continue
            if answer[20:24] == address.packed:
                return name
    return None
