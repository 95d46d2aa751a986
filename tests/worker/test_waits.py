"""Whoever waits for gloo returns when the connections are cut, however much of an operation was transferred."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from etc_agent.torch_private.gloo_works import abort_of, replace_wait
from etc_agent.worker.world.connections import Connections
from etc_agent.worker.world.gloo import RecordedGloo
from etc_agent.worker.world.waits import Waits, free_waits

GROUP_TIMEOUT_S = 60.0
FREED_WITHIN_S = 10.0
LARGE = 32 * 1024 * 1024
"""Elements of a message that is still under way when the first of them has arrived."""


@pytest.fixture(autouse=True)
def waits_are_freeable() -> Iterator[None]:
    free_waits(lambda: None)
    yield
    replace_wait(lambda wait: wait)


class Pair:
    """Two ranks of a group in this process, each with connections of its own."""

    def __init__(self) -> None:
        store = dist.HashStore()
        self.connections = [Connections(), Connections()]
        self.groups: list[RecordedGloo] = [None, None]  # type: ignore[list-item]
        timeout = timedelta(seconds=GROUP_TIMEOUT_S)

        def make(rank: int) -> None:
            self.groups[rank] = RecordedGloo(store, rank, 2, timeout, self.connections[rank])

        threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def cut(self) -> None:
        for each in self.connections:
            each.cut()


class Waiting:
    """A thread that waits for a work."""

    def __init__(self, work: dist.Work) -> None:
        self.error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self.error = error

    def freed(self) -> Exception | None:
        self._thread.join(FREED_WITHIN_S)
        assert not self._thread.is_alive(), "still waiting"
        return self.error


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + FREED_WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def test_the_library_has_what_ends_a_wait() -> None:
    pair = Pair()
    work = pair.groups[0].recv([torch.zeros(1)], 1, 7)
    assert abort_of(work) is not None
    pair.cut()
    with pytest.raises(RuntimeError):
        work.wait()


def test_a_collective_is_not_taken_for_a_receive() -> None:
    pair = Pair()
    works = [group.allreduce([torch.ones(1)]) for group in pair.groups]
    assert [abort_of(work) for work in works] == [None, None]
    for work in works:
        work.wait()


def test_both_ends_of_a_message_that_was_half_received_are_freed() -> None:
    pair = Pair()
    whole, part = torch.ones(LARGE), torch.zeros(LARGE)
    receiving = Waiting(pair.groups[0].recv([part], 1, 7))
    sending = Waiting(pair.groups[1].send([whole], 0, 7))
    until(lambda: bool(part[0]))
    pair.cut()
    assert not part[-1], "all of it arrived before the cut; the test shows nothing"
    assert receiving.freed() is not None
    assert sending.freed() is not None


def test_a_wait_that_begins_after_the_cut_ends_at_once() -> None:
    pair = Pair()
    part = torch.zeros(LARGE)
    work, sent = pair.groups[0].recv([part], 1, 7), pair.groups[1].send([torch.ones(LARGE)], 0, 7)
    until(lambda: bool(part[0]))
    pair.cut()
    assert Waiting(work).freed() is not None
    assert Waiting(sent).freed() is not None


class Stuck(dist.Work):
    """A collective in which a thread of gloo stays, whatever is cut."""

    def is_completed(self) -> bool:
        return False


def test_a_collective_that_gloo_does_not_end_is_left_by_its_waiter() -> None:
    slices: list[timedelta] = []

    def wait(_: dist.Work, timeout: timedelta) -> bool:
        slices.append(timeout)
        raise RuntimeError("Operation timed out!")

    waits, no_timeout = Waits(), timedelta(0)
    waits.end()
    with pytest.raises(RuntimeError, match="connections to other workers were cut"):
        waits.wait(Stuck(), wait, no_timeout)
    assert len(slices) == 1
    with pytest.raises(RuntimeError, match="Operation timed out"):
        Waits().wait(Stuck(), wait, timedelta(seconds=0.001))


def test_what_is_not_cut_goes_on() -> None:
    cut, kept = Pair(), Pair()
    values = [torch.ones(3) * (rank + 1) for rank in range(2)]
    first = Waiting(kept.groups[0].allreduce([values[0]]))
    cut.cut()
    second = Waiting(kept.groups[1].allreduce([values[1]]))
    assert first.freed() is second.freed() is None
    assert values[0].tolist() == [3.0] * 3
    received = torch.zeros(2)
    works = [kept.groups[0].recv([received], 1, 7), kept.groups[1].send([torch.ones(2)], 0, 7)]
    assert [Waiting(work).freed() for work in works] == [None, None]
    assert received.tolist() == [1.0, 1.0]
