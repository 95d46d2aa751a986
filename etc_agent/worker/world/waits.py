"""Threads that wait for gloo, and freeing them when the connections are cut.

Cutting the sockets ends most operations of gloo, but not one of which a part was transferred. A wait in Python is ended
here in any case: that for a send or receive at once, that for a collective when its present slice is over, while a
thread of gloo stays in the collective. Waits in C++, as those of DDP's reducer, do not come through here.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from etc_agent.torch_private.gloo_works import Abort, abort_of, replace_wait

_SLICE = timedelta(milliseconds=100)
_NO_TIMEOUT = timedelta(0)
"""PyTorch's own word for the timeout of the group."""


class Waits:
    """The waits for operations over some connections. `end` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[int, tuple[dist.Work, Abort]] = {}
        self._are_over = False

    def end(self) -> None:
        """The connections are cut: end every wait, now and later, with a RuntimeError."""
        with self._lock:
            self._are_over = True
            for work, abort in self._under_way.values():
                abort(work)

    def wait(self, work: dist.Work, wait: Callable[..., bool], timeout: timedelta) -> bool:
        """``wait(work, timeout)``, until `end`.

        Raises:
            RuntimeError: the connections were cut, or what `wait` raises.
        """
        abort = abort_of(work)
        if abort is None:
            return self._in_slices(work, wait, timeout)
        key = threading.get_ident()
        with self._lock:
            self._under_way[key] = work, abort
            if self._are_over:
                abort(work)
        try:
            if not wait(work, timeout):
                raise _cut()
            return True
        finally:
            with self._lock:
                del self._under_way[key]

    def _in_slices(self, work: dist.Work, wait: Callable[..., bool], timeout: timedelta) -> bool:
        deadline = time.monotonic() + timeout.total_seconds() if timeout else float("inf")
        while True:
            try:
                return wait(work, _SLICE)
            except RuntimeError:
                if work.is_completed():
                    return wait(work, _NO_TIMEOUT)  # it may have ended after the slice
                if time.monotonic() >= deadline:
                    raise
                if self._are_over:
                    raise _cut() from None


def _cut() -> RuntimeError:
    return RuntimeError("the connections to other workers were cut: workers were lost, or the change was withdrawn")


_waits_of: weakref.WeakKeyDictionary[dist.Work, Waits] = weakref.WeakKeyDictionary()


def noted(work: dist.Work, waits: Waits) -> dist.Work:
    """Return `work`, an operation of gloo; whoever waits for it does so by `waits`."""
    _waits_of[work] = waits
    return work


def free_waits(present: Callable[[], Waits | None]) -> None:
    """From now on every ``work.wait()`` of Python can be ended. `present`: by which waits the calling thread waits for
    works that were not noted; None where these are not gloo's."""

    def make(wait: Callable[..., bool]) -> Callable[..., bool]:
        def waited(work: dist.Work, timeout: timedelta = _NO_TIMEOUT, **others: Any) -> bool:
            waits = _waits_of.get(work) or present()
            return wait(work, timeout, **others) if waits is None else waits.wait(work, wait, timeout)

        return waited

    replace_wait(make)
