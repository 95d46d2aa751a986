"""The guard: keeps a private etcd alive as long as its owner, and no longer. Run as a script: guard.py FOLDER
COMMAND...

Starts COMMAND and prints its process id. If COMMAND is ended by a signal that the owner did not ask for, the guard
starts it again with its data and prints the new process id: a scheduler that ends a job signals all of its processes at
once, and the owner needs etcd in order to leave in an orderly way. (etcd handles SIGTERM even if it was ignored when
etcd started.) When COMMAND exits by itself, the guard exits with its exit code.

The owner sends orders as lines on standard input: ``stop`` (SIGTERM) and ``kill`` (SIGKILL) end COMMAND for good. When
standard input closes, which happens when the owner dies in any way, the guard ends COMMAND and removes FOLDER. COMMAND
also dies with the guard: a parent-death signal follows the thread that forked, and the guard has only one thread. It
imports nothing of this project, so that it is small and starts quickly.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

_GRACE_S = 3.0
_PAUSE_S = 0.2
"""Seconds before COMMAND is started again."""
_PR_SET_PDEATHSIG = 1
_FOR_OTHERS = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
)
"""Signals that a scheduler may send to every process of a job; only the agent has to act on them."""


class Guard:
    """`command`: started at once. `folder`: where its data are."""

    def __init__(self, folder: str, command: list[str]) -> None:
        self._folder, self._command = folder, command
        self._orders = b""
        self._is_ordered = False
        self._child = self._start()

    def run(self) -> int:
        """Until the command has ended for good. Returns its exit code."""
        while True:
            if not self._wait_for_end():
                self._end_with_owner()
                return self._child.returncode
            if self._child.returncode >= 0 or self._is_ordered:
                return self._child.returncode
            if select.select([0], [], [], _PAUSE_S)[0] and not self._hear():
                shutil.rmtree(self._folder, ignore_errors=True)
                return 0
            if self._is_ordered:
                return self._child.returncode
            self._child = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        libc, guard = ctypes.CDLL(None), os.getpid()

        def prepare() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:  # the guard died before prctl took effect
                os._exit(1)

        for left in Path().glob("*.sock:0"):  # sockets of a killed etcd would prevent the next from listening
            left.unlink(missing_ok=True)
        child = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), preexec_fn=prepare
        )
        with contextlib.suppress(BrokenPipeError):  # the owner is gone already, which standard input will show
            os.write(sys.stdout.fileno(), b"%d\n" % child.pid)
        return child

    def _wait_for_end(self) -> bool:
        """Follow orders until the command has ended; returns False if the owner is gone before that."""
        ended = os.pidfd_open(self._child.pid)
        try:
            while True:
                ready, _, _ = select.select([0, ended], [], [])
                if ended in ready:
                    self._child.wait()
                    return True
                if not self._hear():
                    return False
        finally:
            os.close(ended)

    def _hear(self) -> bool:
        """Read and follow the owner's orders; returns False if the owner is gone."""
        more = os.read(0, 1 << 12)
        *lines, self._orders = (self._orders + more).split(b"\n")
        for line in lines:
            self._is_ordered = True
            self._child.send_signal(signal.SIGKILL if line == b"kill" else signal.SIGTERM)
        return bool(more)

    def _end_with_owner(self) -> None:
        self._child.terminate()
        try:
            self._child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def main(folder: str, command: list[str]) -> int:
    for number in _FOR_OTHERS:
        signal.signal(number, signal.SIG_IGN)
    return Guard(folder, command).run()


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    sys.exit(code if code >= 0 else 128 - code)
