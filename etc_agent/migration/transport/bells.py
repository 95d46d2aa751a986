"""Bells: pipes through which workers of one host tell each other that data is in their shared memory.

Each ordered pair of workers has one pipe. The peer opens it through /proc, as it does the shared memory. A message is a
tag of four bytes. The process group could carry this notification too, but it wakes a thread at both ends before the
thread that waits; with rounds of a few megabytes that took longer than the copies. When a process dies, the kernel
closes its pipes, so its peers notice at once. A forked child (a dataloader's worker) may outlive the worker, so it
closes the ends that it inherits.
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
"""How to open the writing end of a pipe: process id, file descriptor and inode."""

_TAG = struct.Struct("<I")
_all: weakref.WeakSet[Bells] = weakref.WeakSet()


class Bells:
    """The bells between one worker and its neighbours.

    Args:
        peers: the neighbours.

    Attributes:
        doors: peer -> what that peer passes to `open_to` in order to ring this worker.

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
        """Open the pipe to a peer, given the entry for this worker in the peer's `doors`; returns whether it worked."""
        pid, end, inode = door
        try:
            # Non-blocking: by now this descriptor may be a pipe without a reader, or any other file.
            opened = os.open(f"/proc/{pid}/fd/{end}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        self._rings[peer] = opened
        os.set_blocking(opened, True)
        found = os.fstat(opened)
        return stat.S_ISFIFO(found.st_mode) and found.st_ino == inode

    def all_opened(self) -> None:
        """Every peer has opened its pipe: close the writing ends here, so that a pipe closes when its peer dies."""
        while self._own_ends:
            os.close(self._own_ends.pop())

    def ring(self, peer: int, tag: int) -> None:
        """Send `tag` to a peer.

        Raises:
            RuntimeError: the peer's process has ended.
        """
        try:
            os.write(self._rings[peer], _TAG.pack(tag))
        except OSError as error:
            raise RuntimeError(f"worker {peer} is gone: {error}") from error

    def wait(self, peer: int, tag: int, timeout_s: float) -> None:
        """Wait until a peer has sent `tag`.

        Raises:
            RuntimeError: the peer's process has ended, or nothing came in `timeout_s`.
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
        """Close all pipes, so that peers waiting for this worker fail at once."""
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
    """An operation that is complete when a peer has rung."""

    def __init__(self, bells: Bells, peer: int, tag: int) -> None:
        self._bells, self._peer, self._tag = bells, peer, tag

    def wait(self, timeout: datetime.timedelta) -> bool:
        self._bells.wait(self._peer, self._tag, timeout.total_seconds())
        return True
