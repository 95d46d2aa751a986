"""The TCP connections of the gloo groups of a change, so that a change can be broken off.

gloo cannot abort an operation; but all that wait in one are freed when the sockets under it are shut down.
A group listens at one port, and each of its connections has that port of one of the two ends: so a connection is told
by its ends, and those of the store, of the script and of other generations are never touched.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

Endpoint = tuple[str, int]
"""IP address and port."""

_INTERFACES = "GLOO_SOCKET_IFNAME"


class Connections:
    """Those of the groups that were made through `record`. `cut` may be called from any thread."""

    def __init__(self) -> None:
        self._listening: dict[int, Endpoint] = {}
        self._peers: frozenset[Endpoint] = frozenset()

    def record(self, make: Callable[[], T], num_groups: Callable[[T], int]) -> T:
        """What ``make()`` returns, with the ports noted at which its groups listen.

        Where the process has begun to listen at other ports meanwhile, nothing can be told apart and nothing is noted:
        what then waits for a peer ends with its timeout.
        """
        before = _listening_sockets()
        made = make()
        new = {inode: endpoint for inode, endpoint in _listening_sockets().items() if inode not in before}
        if len(new) == num_groups(made) * _interfaces():
            self._listening |= new
        return made

    @property
    def listening(self) -> tuple[Endpoint, ...]:
        """Where this process's groups listen, to be told to the peers."""
        return tuple(self._listening.values())

    def learn(self, peers: Iterable[Endpoint]) -> None:
        """Note where the groups of the other processes listen."""
        self._peers = frozenset(peers)

    def cut(self) -> int:
        """Shut every connection of the groups down; returns how many there were."""
        present = _listening_sockets()
        own = {endpoint for inode, endpoint in self._listening.items() if present.get(inode) == endpoint}
        num_cut = 0
        for each in _own_sockets():
            with each:
                near, far = _endpoint(each.getsockname()), _far_end(each)
                if far is not None and (near in own or far in self._peers):
                    _shut(each)
                    num_cut += 1
        return num_cut


class StoreConnection:
    """The connection of one client of a TCPStore. A store that does not answer holds its client without end."""

    def __init__(self) -> None:
        self._inode: int | None = None

    def record(self, connect: Callable[[], T], port: int) -> T:
        """What ``connect()`` returns: a new client of the store at `port`."""
        before = _inodes_to(port)
        client = connect()
        new = _inodes_to(port) - before
        self._inode = new.pop() if len(new) == 1 else None
        return client

    def cut(self) -> None:
        """Shut it down. May be called from any thread."""
        for each in _own_sockets():
            with each:
                if os.fstat(each.fileno()).st_ino == self._inode:
                    _shut(each)


def _inodes_to(port: int) -> set[int]:
    """Connections to `port` at the far end."""
    found = set()
    for each in _own_sockets():
        with each:
            far = _far_end(each)
            if far is not None and far[1] == port:
                found.add(os.fstat(each.fileno()).st_ino)
    return found


def _interfaces() -> int:
    """At how many ports one group listens."""
    return len(os.environ.get(_INTERFACES, "").split(","))


def _listening_sockets() -> dict[int, Endpoint]:
    """inode -> where it listens."""
    found = {}
    for each in _own_sockets():
        with each:
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[os.fstat(each.fileno()).st_ino] = _endpoint(each.getsockname())
    return found


def _own_sockets() -> Iterator[socket.socket]:
    """Duplicates of this process's TCP sockets, for the caller to close: what a descriptor stands for may change at any
    moment, what a duplicate stands for does not."""
    for name in os.listdir("/proc/self/fd"):
        try:
            # Nothing else is duplicated: to close one duplicate of a file gives up the process's locks on it.
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            each = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # it was closed meanwhile
        if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
            yield each
        else:
            each.close()


def _far_end(connection: socket.socket) -> Endpoint | None:
    try:
        return _endpoint(connection.getpeername())
    except OSError:
        return None


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other end was quicker


def _endpoint(name: tuple) -> Endpoint:
    address = ipaddress.ip_address(name[0].partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address), name[1]
