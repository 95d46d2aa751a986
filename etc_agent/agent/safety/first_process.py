"""Running as PID 1, the first process of a container.

The kernel makes PID 1 the parent of every process whose own parent has ended, and gives it no default actions for
signals. An agent would have to tell such orphans from its own children, for which other code waits. So PID 1 only reaps
and forwards signals, and the agent is its child.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

_OF_ITS_OWN = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGTTIN, signal.SIGTTOU,
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS,
}
"""Signals that cannot be forwarded, or that a process causes itself."""


def beside_first_process(main: Callable[[], int]) -> int:
    """Run `main`. Where this process is PID 1, run it in a child, while this process forwards signals to it and reaps
    all processes that end. Returns the exit code of `main` (128 + signal if one ended the child). Call it before any
    thread starts."""
    if os.getpid() != 1:
        return main()
    numbers = signal.valid_signals() - _OF_ITS_OWN
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return main()
    while True:
        number = signal.sigwait(numbers)
        if number != signal.SIGCHLD:
            os.kill(child, number)
        elif (exit_code := _reap(child)) is not None:
            return exit_code


def _reap(child: int) -> int | None:
    """Wait for every process that has ended; returns the exit code of `child` if it is among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == 0:
            return None
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
