"""The guardian: outlives the agent just long enough to take everything with it that the agent started.

A parent-death signal follows the spawning thread and misses grandchildren; a pipe does neither. The agent holds the
write end, and whatever kills the agent closes it. The guardian then kills the process groups that it was told of and
removes the folders.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO


class Guardian:
    """The agent's end of the pipe. One guardian serves all workers of a node, and the private etcd."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, text=True,
        )
        assert self._process.stdin is not None
        self._pipe: IO[str] = self._process.stdin

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch_group(self, group: int) -> None:
        """Kill process group `group` if the agent dies."""
        self._tell(f"watch {group}")

    def forget_group(self, group: int) -> None:
        """Process group `group` is gone; its number may be another's soon."""
        self._tell(f"forget {group}")

    def remove_folder(self, folder: Path) -> None:
        """Remove `folder` and what is in it when the agent is gone, however it goes."""
        self._tell(f"remove {folder}")

    def close(self, timeout_s: float = 10.0) -> None:
        """Let it do its work now and wait for it."""
        self._pipe.close()
        self._process.wait(timeout_s)

    def _tell(self, line: str) -> None:
        try:
            self._pipe.write(line + "\n")
            self._pipe.flush()
        except OSError:
            raise RuntimeError("the guardian process is gone; a dead agent would now leave workers behind") from None


def _guard() -> None:
    """The guardian process: reads commands from standard input until its end, then cleans up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    folders: list[str] = []
    for line in sys.stdin:
        command, _, operand = line.rstrip("\n").partition(" ")
        if command == "watch":
            groups.add(int(operand))
        elif command == "forget":
            groups.discard(int(operand))
        elif command == "remove":
            folders.append(operand)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _guard()
