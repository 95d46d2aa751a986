"""The TCP connections of the gloo groups of a change or a generation, so that they can be cut.

gloo cannot abort an operation, but it reports the end of a connection to the operations that use it. Each group listens
on a port of its own, and every connection of the group has that port at one end. So connections are recognised by their
ports, and those of the store, of the script and of other generations are never touched.

The end of a connection is reported to all operations except a message that is half received, and one that could not
be written. So a connection is shut down in one direction only, and stays open until its `Connections` is dropped: if
writing failed first, on this side or because this side no longer takes what the other one writes, the operation whose
message that was would wait for its timeout.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from etc_agent.worker.world.waits import Waits

T = TypeVar("T")

Endpoint = tuple[str, int]
"""IP address and port."""

_listens = threading.Lock()


class Connections:
    """The connections of some gloo groups. `cut` and `hang_up` may be called from any thread.

    Attributes:
        waits: the waits for operations over them, which `cut` ends.
    """

    def __init__(self) -> None:
        self.waits = Waits()
        self._listening: dict[int, Endpoint] = {}
        self._peers: frozenset[Endpoint] = frozenset()
        self._kept: dict[int, int] = {}  # inode -> a descriptor
        self._shutting = threading.Lock()
        weakref.finalize(self, _close_all, self._kept)

    def listen(self, make_devices: Callable[[], Sequence[T]]) -> tuple[list[Endpoint], Sequence[T]]:
        """Return the ports on which the devices listen that ``make_devices()`` makes, one for each, and the devices.

        Where the process has opened another listening port in that moment, the ports cannot be told apart and none is
        noted: an operation that waits for a peer then ends with its timeout only.
        """
        with _listens:
            before = _listening_sockets()
            devices = make_devices()
            new = {inode: endpoint for inode, endpoint in _listening_sockets().items() if inode not in before}
        if len(new) != len(devices):
            return [], devices
        self._listening = self._listening | new
        return list(new.values()), devices

    def learn(self, peers: Iterable[Endpoint]) -> None:
        """Note where the groups of the other processes listen."""
        self._peers = self._peers | frozenset(peers)

    def cut(self) -> int:
        """Have every operation of this process fail; returns how many connections there were. The other processes cut
        for themselves: what they still send is taken and dropped."""
        num_cut = self._shut_all(socket.SHUT_RD)
        self.waits.end()
        return num_cut

    def hang_up(self) -> int:
        """Have every operation of the other processes fail. This one has none under way. Returns how many connections
        there were."""
        return self._shut_all(socket.SHUT_WR)

    def close(self) -> None:
        """Close what `cut` and `hang_up` have kept open: the groups are gone. Without this it is closed with the last
        reference to this object."""
        with self._shutting:
            _close_all(self._kept)

    def _shut_all(self, direction: int) -> int:
        present = _listening_sockets()
        own = {endpoint for inode, endpoint in self._listening.items() if present.get(inode) == endpoint}
        num_shut = 0
        for each in _own_sockets():
            with each:
                near, far = _endpoint(each.getsockname()), _far_end(each)
                if far is not None and (near in own or far in self._peers):
                    self._keep(each)
                    _shut(each, direction)
                    num_shut += 1
        return num_shut

    def _keep(self, connection: socket.socket) -> None:
        with self._shutting:
            inode = os.fstat(connection.fileno()).st_ino
            if inode not in self._kept:
                self._kept[inode] = os.dup(connection.fileno())


class StoreConnection:
    """The connection of one TCPStore client. A client whose store does not answer would wait without limit."""

    def __init__(self) -> None:
        self._inode: int | None = None

    def record(self, connect: Callable[[], T], port: int) -> T:
        """Return ``connect()``, which makes a new client of the store at `port`."""
        before = _inodes_to(port)
        client = connect()
        new = _inodes_to(port) - before
        self._inode = new.pop() if len(new) == 1 else None
        return client

    def cut(self) -> None:
        """Shut the connection down. May be called from any thread."""
        for each in _own_sockets():
            with each:
                if os.fstat(each.fileno()).st_ino == self._inode:
                    _shut(each, socket.SHUT_RDWR)


def _inodes_to(port: int) -> set[int]:
    """The inodes of this process's connections whose remote port is `port`."""
    found = set()
    for each in _own_sockets():
        with each:
            far = _far_end(each)
            if far is not None and far[1] == port:
                found.add(os.fstat(each.fileno()).st_ino)
    return found


def _listening_sockets() -> dict[int, Endpoint]:
    """The inode of each listening socket -> its address."""
    found = {}
    for each in _own_sockets():
        with each:
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[os.fstat(each.fileno()).st_ino] = _endpoint(each.getsockname())
    return found


def _own_sockets() -> Iterator[socket.socket]:
    """Duplicates of this process's TCP sockets, for the caller to close. Other threads may close and reuse a descriptor
    at any moment; a duplicate keeps referring to the same socket."""
    for name in os.listdir("/proc/self/fd"):
        try:
            # Only sockets are duplicated: closing a duplicate of a file would release the process's locks on it.
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            each = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed by another thread
        if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
            yield each
        else:
            each.close()


def _far_end(connection: socket.socket) -> Endpoint | None:
    try:
        return _endpoint(connection.getpeername())
    except OSError:
        return None


def _shut(connection: socket.socket, direction: int) -> None:
    try:
        connection.shutdown(direction)
    except OSError:
        pass  # the peer has closed it already


def _endpoint(name: tuple) -> Endpoint:
    address = ipaddress.ip_address(name[0].partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address), name[1]


def _close_all(descriptors: dict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
