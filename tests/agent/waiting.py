"""Waiting for what other threads and processes do, and processes to be ended."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain for {what}"
        time.sleep(0.01)


@contextmanager
def process_group() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing for long, in a group of its own; it stands for a worker."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None
