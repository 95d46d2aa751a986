"""The last resort for a survivor whose main thread does not come free: it ends itself, as another lost worker.

A cut frees whoever waits in an operation with other workers, except where gloo has lost the operation itself: a message
of the lost worker that is half received, one to it that could not be written. C++ that waits for such an operation (the
backward pass of DistributedDataParallel, a tensor of DTensor) cannot be interrupted. All other survivors would wait for
this worker as long as the operation may take, half an hour by default.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable

from etc_agent.control.messages import Position
from etc_agent.worker.process.position import dump_stacks

_log = logging.getLogger(__name__)

_IDLE = 0.05
"""CPU seconds in a second, of all other threads of this process, below which nothing is being computed."""


class Stuck:
    """Watches the main thread after a cut. `position`: where it is; `limit_s`: how long it may stay in an operation
    with other workers while nothing in this process computes. `clock_s`, `busy_s`: the time, and the CPU seconds
    that this process has used without the calling thread."""

    def __init__(
        self, position: Callable[[], Position], limit_s: float, clock_s: Callable[[], float] = time.monotonic,
        busy_s: Callable[[], float] = lambda: time.process_time() - time.thread_time(),
    ) -> None:
        self._position = position
        self._limit_s = limit_s
        self._clock_s, self._busy_s = clock_s, busy_s
        self._begin()

    def _begin(self) -> None:
        self._since_s, self._busy_before_s = self._clock_s(), self._busy_s()

    def look(self) -> bool:
        """Whether the main thread is stuck. To be called again and again, always from the same thread."""
        if not self._position().is_waiting:
            self._begin()
            return False
        waited_s = self._clock_s() - self._since_s
        if waited_s < self._limit_s:
            return False
        if self._busy_s() - self._busy_before_s > _IDLE * waited_s:
            self._begin()
            return False
        return True


def end_this_worker(position: Position, limit_s: float) -> None:
    """End this process by SIGKILL, which its agent takes for a loss like any other."""
    dump_stacks()
    _log.error(
        "workers were lost, and step %d at %s has not broken off within %g s (abort_timeout_s, at most 10): this "
        "worker ends itself, so that the others can go on without it", position.step, position.where, limit_s,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
