"""The guardian: a process that outlives the agent to end everything that the agent started, and to say so in etcd.

A parent-death signal follows the thread that forked and does not reach grandchildren; a pipe has neither problem. The
agent holds the writing end, and whatever kills the agent closes it. The guardian then kills the registered process
groups, waits until they have no living members, testifies in etcd (`etc_agent.agent.safety.testimony`), and removes the
registered folders. A stopped agent closes nothing, so it also tells until when the groups may run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_PROGRAM = Path(__file__).resolve().with_name("guardian_process.py")


class Guardian:
    """The agent's end of the pipe. One guardian serves all workers of a node, and the private etcd."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, text=True,
        )
        assert self._process.stdin is not None
        self._pipe: IO[str] = self._process.stdin
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Inside the context a process is started and its group passed to `watch_group`. If the agent dies in between,
        the guardian cannot know whether that process runs, and does not testify."""
        self._tell("starting")
        try:
            yield
        finally:
            self._tell("started")

    def watch_group(self, group: int) -> None:
        """Kill process group `group` if the agent dies."""
        self._tell(f"watch {group}")

    def forget_group(self, group: int) -> None:
        """Process group `group` has ended; its number may soon be used for another group."""
        self._tell(f"forget {group}")

    def allow_until(self, deadline: float) -> None:
        """Kill the present groups if `deadline`, in time.monotonic() seconds, passes before another one is given."""
        self._tell(f"until {deadline}")

    def testify(self, testimony: dict[str, Any], limit_s: float) -> None:
        """When the agent is gone and all groups have ended, write that to etcd. `testimony`: what the program that does
        it needs to know (`testimony.Case`), which replaces what was told before; empty for none. `limit_s`: how long
        that may take."""
        self._tell(f"testify {limit_s} {json.dumps(testimony) if testimony else ''}")

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
