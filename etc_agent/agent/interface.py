"""The network interface that the workers' gloo groups speak through."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>


def gloo_variables(address: str) -> dict[str, str]:
    """What a worker's environment needs so that gloo listens at `address`, where other nodes reach this one.

    By itself gloo listens where this host's name leads, often a loopback address that nobody else can reach. Empty
    where that is right, where the user has chosen, and where no interface has the address.
    """
    if _VARIABLE in os.environ:
        return {}
    wanted = _resolve(address)
    if wanted is None or wanted.startswith("127.") or wanted == _resolve(socket.gethostname()):
        return {}
    name = _interface_of(wanted)
    return {_VARIABLE: name} if name else {}


def _resolve(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


def _interface_of(address: str) -> str | None:
    """The interface whose IPv4 address is `address`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
