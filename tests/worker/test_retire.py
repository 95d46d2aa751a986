"""The memory of a generation that is left is free at once, whatever its process groups are still waiting for."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

from etc_agent.worker.change.retire import Retired, Retirements


class Unread:
    """A message to a worker that left without reading it."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def wait(self) -> None:
        self.is_over.wait()
        raise RuntimeError("Timed out waiting 1800000ms for send operation to complete")


class Group:
    """A process group whose last reference is dropped when its operations are over, as gloo's destructor does it."""

    def __init__(self, held: threading.Event) -> None:
        self._held = held
        self.is_gone = threading.Event()

    def __del__(self) -> None:
        self._held.wait()
        self.is_gone.set()


def test_the_next_change_does_not_wait_for_operations_that_gloo_has_lost() -> None:
    send, is_over = Unread(), threading.Event()
    group = Group(is_over)
    is_gone = group.is_gone
    prepared = SimpleNamespace(group=group, next=None)

    def close() -> None:
        prepared.group = None

    prepared.close = close
    retirements = Retirements()
    retirements.announce()
    retirements.retire(Retired(None, cast(Any, prepared), [cast(Any, send)]))
    del group
    assert retirements.wait(10.0)
    send.is_over.set()
    assert not is_gone.wait(0.05)
    is_over.set()
    assert is_gone.wait(10.0)
