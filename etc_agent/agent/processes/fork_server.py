"""Forks workers from a copy of the agent that was made before it connected to etcd.

The etcd client has threads, and locks that these may hold at any time, so a fork of the agent itself can hang.
Therefore the agent forks once, early, and that process forks the workers on demand. Unlike multiprocessing's fork
server it is a copy of the program that started the job, with everything that a forked worker expects in its memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from etc_agent.errors import EtcError

_ANSWER_S = 60.0
"""Seconds that one fork may take: a process with much memory has large page tables to copy."""


@dataclass(frozen=True, slots=True)
class _Forked:
    """A process that the server has forked."""

    server: ForkServer
    pid: int

    def poll(self) -> int | None:
        return self.server.exit_code(self.pid)


class ForkServer:
    """The agent's end. `run(place)` is called in each forked process, which leads a session and a process group."""

    def __init__(self, run: Callable[[Any], None]) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._lock = threading.Lock()
        self._exit_codes: dict[int, int] = {}
        self._is_gone = False
        sys.stdout.flush()  # otherwise each forked process would write the buffered text again
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            self._connection.close()
            try:
                _serve(theirs, run)
            finally:
                os._exit(0)
        theirs.close()

    def start(self, place: Any) -> _Forked:
        """Fork a process that calls ``run(place)``.

        Raises:
            EtcError: the server is gone, or does not answer.
        """
        with self._lock:
            try:
                self._connection.send(place)
                while self._connection.poll(_ANSWER_S):
                    if (pid := self._take()) is not None:
                        return _Forked(self, pid)
            except (OSError, EOFError):
                raise EtcError("the process that forks the workers was killed; start the job again") from None
        raise EtcError(f"the process that forks the workers has not answered for {_ANSWER_S:g} s")

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a forked process once it has ended. If the server is gone, the process is killed."""
        with self._lock:
            try:
                while not self._is_gone and self._connection.poll():
                    self._take()
            except (OSError, EOFError):
                self._is_gone = True
            if self._is_gone and pid not in self._exit_codes:
                _kill(pid)
                self._exit_codes[pid] = -signal.SIGKILL
            return self._exit_codes.get(pid)

    def close(self) -> None:
        """End the server, but not the processes that it has forked."""
        self._connection.close()
        try:
            os.waitpid(self._pid, 0)
        except ChildProcessError:  # other code in this program has already waited for it
            pass

    def _take(self) -> int | None:
        """The pid of a process that was started; notices about processes that ended are recorded."""
        pid, exit_code = self._connection.recv()
        if exit_code is None:
            return int(pid)
        self._exit_codes[pid] = exit_code
        return None


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the process may not lead a group of its own yet
        try:
            kill(pid, signal.SIGKILL)
            return
        except ProcessLookupError:
            continue


def _serve(connection: Connection, run: Callable[[Any], None]) -> None:
    """The server process: fork on demand and report exits, until the agent is gone.

    It leads a session of its own and blocks every signal, since the agent decides what ends when. Signals that reach a
    forked process before it is ready stay pending, and are then handled as in the program that started the job.
    """
    os.setsid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    context = multiprocessing.get_context("fork")

    def run_here(place: Any) -> None:
        connection.close()
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        run(place)

    running: list[Any] = []
    while True:
        ready = wait([connection, *(process.sentinel for process in running)])
        for process in [process for process in running if process.sentinel in ready]:
            process.join()
            running.remove(process)
            connection.send((process.pid, process.exitcode))
            process.close()
        if connection in ready:
            try:
                place = connection.recv()
            except (EOFError, OSError):
                return
            process = context.Process(target=run_here, args=(place,))
            process.start()
            running.append(process)
            connection.send((process.pid, None))
