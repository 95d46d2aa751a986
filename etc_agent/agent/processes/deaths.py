"""Tells the agent at once that a process has ended, whoever its parent is: through a pidfd, not by polling."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

_FIRST_S = 0.002
_LONGEST_S = 0.1


class DeathWatch:
    """Calls `on_death` from a thread of its own when a watched process has ended, and again and again until that is
    forgotten: whoever has to wait for the process may know its exit code only a moment later.

    Where the kernel has no pidfd (before Linux 5.3) nothing is called, and the agent's regular look finds the death.
    """

    def __init__(self, on_death: Callable[[], None]) -> None:
        self._on_death = on_death
        self._lock = threading.Lock()
        self._descriptors: dict[int, int] = {}
        self._ended: set[int] = set()
        self._epoll = select.epoll()
        self._wake = os.eventfd(0)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="death-watch", daemon=True)
        self._thread.start()

    def watch(self, pid: int) -> None:
        """Watch a process that nobody has waited for yet."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._on_death()
            return
        except OSError:
            return
        with self._lock:
            self._descriptors[pid] = descriptor
            self._epoll.register(descriptor, select.EPOLLIN)

    def forget(self, pid: int) -> None:
        """The end of this process is known."""
        with self._lock:
            descriptor = self._descriptors.pop(pid, None)
            if descriptor is None:
                return
            if descriptor not in self._ended:
                self._epoll.unregister(descriptor)
            self._ended.discard(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        """Watch nothing any more. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for pid in list(self._descriptors):
            self.forget(pid)
        self._epoll.close()
        os.close(self._wake)

    def _run(self) -> None:
        pause_s = _FIRST_S
        while not self._is_closed:
            found = [descriptor for descriptor, _ in self._epoll.poll(pause_s if self._ended else None)]
            with self._lock:
                for descriptor in found:
                    if descriptor in self._descriptors.values():
                        self._epoll.unregister(descriptor)
                        self._ended.add(descriptor)
                        pause_s = _FIRST_S
            if self._ended:
                self._on_death()
                pause_s = min(2 * pause_s, _LONGEST_S)
