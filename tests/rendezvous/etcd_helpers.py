"""What several test files of this room need."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> float:
    """Wait until `condition` is true; the seconds that took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout_s, f"not true after {timeout_s} s"
        time.sleep(0.005)
    return time.monotonic() - begin
