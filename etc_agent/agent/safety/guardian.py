"""The guardian: a process that survives the agent just long enough to end everything that the agent started.

A parent-death signal follows the thread that forked and does not reach grandchildren; a pipe has neither problem. The
agent holds the writing end, and whatever kills the agent closes it. The guardian then kills the registered process
groups and removes the registered folders. A stopped agent closes nothing, so it also tells until when the groups may
run.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

_LONGEST_S = 3600.0


class Guardian:
    """The agent's end of the pipe. One guardian serves all workers of a node, and the private etcd."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, text=True,
        )
        assert self._process.stdin is not None
        self._pipe: IO[str] = self._process.stdin
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch_group(self, group: int) -> None:
        """Kill process group `group` if the agent dies."""
        self._tell(f"watch {group}")

    def forget_group(self, group: int) -> None:
        """Process group `group` has ended; its number may soon be used for another group."""
        self._tell(f"forget {group}")

    def allow_until(self, deadline: float) -> None:
        """Kill the present groups if `deadline`, in time.monotonic() seconds, passes before another one is given."""
        self._tell(f"until {deadline}")

    def remove_folder(self, folder: Path) -> None:
        """Remove `folder` and its contents when the agent has ended, in any way."""
        self._tell(f"remove {folder}")

    def close(self, timeout_s: float = 10.0) -> None:
        """Let it clean up now, and wait for it."""
        self._pipe.close()
        self._process.wait(timeout_s)

    def _tell(self, line: str) -> None:
        try:
            with self._lock:
                self._pipe.write(line + "\n")
                self._pipe.flush()
        except (OSError, ValueError):  # ValueError after `close`
            raise RuntimeError("the guardian process is gone; a dead agent would now leave workers behind") from None


def _guard() -> None:
    """The guardian process: read commands from standard input until it closes, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    folders: list[str] = []
    until, heard = float("inf"), b""
    while True:
        left_s = until - time.monotonic()
        if left_s <= 0:
            _kill(groups)
            until = float("inf")
            continue
        if not select.select([0], [], [], min(left_s, _LONGEST_S))[0]:
            continue
        more = os.read(0, 1 << 16)
        if not more:
            break
        *lines, heard = (heard + more).split(b"\n")
        for line in lines:
            command, _, operand = line.decode().partition(" ")
            if command == "watch":
                groups.add(int(operand))
            elif command == "forget":
                groups.discard(int(operand))
            elif command == "until":
                until = float(operand)
            elif command == "remove":
                folders.append(operand)
    _kill(groups)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _kill(groups: set[int]) -> None:
    for group in groups:
        for kill in (os.killpg, os.kill):  # a worker that is about to run a function may not lead its group yet
            try:
                kill(group, signal.SIGKILL)
                break
            except ProcessLookupError:
                continue


if __name__ == "__main__":
    _guard()
