"""Bells: how workers of one host tell each other that something is in the memory that they share.

A bell is a pipe, one for each pair and direction, opened through /proc like the memory itself; a message in it is a
tag of four bytes. A byte over the process group would do as well, but it wakes a thread at both ends before the one
that waits; with rounds of a few megabytes that took longer than the copies. The pipes of a process that dies are
closed, so its peers hear of it at once. A forked child (a dataloader's worker) may live on: it closes the ends that it
inherits.
"""

from __future__ import annotations

import datetime
import os
import select
import stat
import struct
import time
import weakref
from collections.abc import Iterable

Door = tuple[int, int, int]
"""A pipe's writing end: process, descriptor and inode."""

_TAG = struct.Struct("<I")
_all: weakref.WeakSet[Bells] = weakref.WeakSet()


class Bells:
    """The bells between one worker and its neighbours.

    Args:
        peers: the neighbours.

    Attributes:
        doors: by peer, what it needs to `open_to` this worker.

    Raises:
        OSError: no descriptors are left.
    """

    def __init__(self, peers: Iterable[int]) -> None:
        self._hears: dict[int, int] = {}
        self._rings: dict[int, int] = {}
        self._own_ends: list[int] = []
        self._heard: set[tuple[int, int]] = set()
        self.doors: dict[int, Door] = {}
        _all.add(self)
        for peer in peers:
            self._hears[peer], own_end = os.pipe()
            self._own_ends.append(own_end)
            self.doors[peer] = (os.getpid(), own_end, os.fstat(own_end).st_ino)

    def open_to(self, peer: int, door: Door) -> bool:
        """Open the bell of a peer, from its `doors`; returns whether that could be done."""
        pid, end, inode = door
        try:
            # Not blocking: by now the number may mean a pipe that nobody reads, or any other file.
            opened = os.open(f"/proc/{pid}/fd/{end}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        self._rings[peer] = opened
        os.set_blocking(opened, True)
        found = os.fstat(opened)
        return stat.S_ISFIFO(found.st_mode) and found.st_ino == inode

    def all_opened(self) -> None:
        """Every peer has opened its bell: close this process's own writing ends, so that a dead peer's pipe closes."""
        while self._own_ends:
            os.close(self._own_ends.pop())

    def ring(self, peer: int, tag: int) -> None:
        """Tell a peer.

        Raises:
            RuntimeError: it is gone.
        """
        try:
            os.write(self._rings[peer], _TAG.pack(tag))
        except OSError as error:
            raise RuntimeError(f"worker {peer} is gone: {error}") from error

    def wait(self, peer: int, tag: int, timeout_s: float) -> None:
        """Wait until a peer has rung with `tag`.

        Raises:
            RuntimeError: it is gone, or nothing came in time.
        """
        deadline = time.monotonic() + timeout_s
        while (peer, tag) not in self._heard:
            poll = select.poll()
            poll.register(self._hears[peer], select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise RuntimeError(f"timed out after {timeout_s:g} s")
            heard = os.read(self._hears[peer], 1 << 12)
            if not heard:
                raise RuntimeError("its process has ended, or its migration has failed")
            self._heard |= {(peer, rung) for (rung,) in _TAG.iter_unpack(heard)}
        self._heard.discard((peer, tag))

    def close(self) -> None:
        """Peers that wait for this worker hear that it is gone."""
        self.all_opened()
        for ends in (self._hears, self._rings):
            while ends:
                os.close(ends.popitem()[1])

    def __del__(self) -> None:
        self.close()


def _close_in_a_child() -> None:
    for bells in list(_all):
        bells.close()


os.register_at_fork(after_in_child=_close_in_a_child)


class Rung:
    """Work that is done when a peer has rung."""

    def __init__(self, bells: Bells, peer: int, tag: int) -> None:
        self._bells, self._peer, self._tag = bells, peer, tag

    def wait(self, timeout: datetime.timedelta) -> bool:
        self._bells.wait(self._peer, self._tag, timeout.total_seconds())
        return True
