"""The fence ends workers before others may go on without them: real guardians, sockets and processes, and no etcd, of
which it needs to know two times only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from waiting import has_ended, process_group, wait_until

from etc_agent.agent.safety.fence import Fence
from etc_agent.agent.safety.guardian import Guardian
from etc_agent.agent.safety.peer_status import Speaker
from etc_agent.reconfig.fencing import Fencing
from etc_agent.reconfig.known.surroundings import Surroundings

FENCING = Fencing(3.0)
NOWHERE = {"c": "127.0.0.1:9"}
"""A node where nobody answers."""
AGENT = """
import subprocess, sys, time
from etc_agent.agent.safety.fence import Fence
from etc_agent.agent.safety.guardian import Guardian
from etc_agent.agent.safety.peer_status import Speaker
from etc_agent.reconfig.fencing import Fencing
from etc_agent.reconfig.known.surroundings import Surroundings

class Etcd:
    lease_until = property(lambda self: time.monotonic() + 3.0)
    heard_at = property(lambda self: time.monotonic())

guardian = Guardian()
fence = Fence(Fencing(4.0), Etcd(), guardian, Speaker("job", "a"), "127.0.0.1")
fence.observe(Surroundings({"b": "127.0.0.1:9"}, has_workers=True))
worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
guardian.watch_group(worker.pid)
print(worker.pid, flush=True)
while not fence.fell:
    time.sleep(0.05)
print(fence.fell, "|", worker.wait(), flush=True)
"""


@dataclass
class Etcd:
    """It answers until `silent_at`."""

    silent_at: float = float("inf")

    @property
    def heard_at(self) -> float:
        return min(time.monotonic(), self.silent_at)

    @property
    def lease_until(self) -> float:
        return self.heard_at + FENCING.ttl_s


@dataclass
class Node:
    name: str
    etcd: Etcd
    fence: Fence
    worker: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.fence.port}"

    def knows(self, *others: Node) -> None:
        self.fence.observe(Surroundings({other.name: other.address for other in others}, has_workers=True))

    def lose_etcd(self) -> float:
        self.etcd.silent_at = time.monotonic()
        return self.etcd.silent_at


@pytest.fixture
def node() -> Iterator[Callable[[str], Node]]:
    """Makes a node that has a worker and hears etcd."""
    with ExitStack() as stack:
        def make(name: str) -> Node:
            guardian, etcd = Guardian(), Etcd()
            stack.callback(guardian.close)
            worker = stack.enter_context(process_group())
            guardian.watch_group(worker.pid)
            fence = Fence(FENCING, etcd, guardian, Speaker("job", name), "127.0.0.1")
            stack.callback(fence.close)
            return Node(name, etcd, fence, worker)

        yield make


def wait_s(seconds: float) -> None:
    """For what must not happen."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > end, "the time to pass", seconds + 10)


def test_a_node_whose_peer_hears_etcd_ends_its_workers_with_its_lease_and_before_the_peer_may_go_on(
    node: Callable[[str], Node],
) -> None:
    a, b = node("a"), node("b")
    b.knows(a)
    wait_until(lambda: b.fence.followed_s > 1.0, "a peer that has followed etcd for a while")
    a.knows(b)
    cut_at = a.lose_etcd()
    wait_until(lambda: has_ended(a.worker), "the end of the worker")
    assert FENCING.ttl_s <= time.monotonic() - cut_at < FENCING.ttl_s + FENCING.trust_s
    wait_until(lambda: a.fence.fell, "the reason")
    assert "node b hears it" in a.fence.fell
    assert not has_ended(b.worker)
    assert b.fence.alive_at.get("a", 0.0) > cut_at, "it said until then that it had workers"


def test_while_etcd_is_away_from_both_no_worker_ends_and_when_it_is_back_they_go_on(
    node: Callable[[str], Node],
) -> None:
    a, b = node("a"), node("b")
    a.knows(b)
    b.knows(a)
    b.lose_etcd()
    a.lose_etcd()
    wait_s(FENCING.ttl_s + 1.0)
    assert not a.fence.followed_s
    b.etcd.silent_at = float("inf")
    wait_s(1.0)
    a.etcd.silent_at = float("inf")
    wait_until(lambda: a.fence.followed_s, "contact with etcd")
    for each in (a, b):
        assert not each.fence.fell
        assert not has_ended(each.worker)


def test_steps_keep_the_workers_of_a_node_that_hears_nobody_only_while_they_need_the_others(
    node: Callable[[str], Node],
) -> None:
    a = node("a")
    a.fence.observe(Surroundings(NOWHERE, frozenset(NOWHERE), has_workers=True))
    cut_at = a.lose_etcd()
    while time.monotonic() < cut_at + FENCING.ttl_s + 1.5:
        a.fence.saw_step(1)
        time.sleep(0.05)
    assert not a.fence.fell
    wait_until(lambda: has_ended(a.worker), "the end of the worker when no step ends any more")
    wait_until(lambda: a.fence.fell, "the reason")
    assert "node c does not answer" in a.fence.fell


def test_a_node_that_knew_of_no_other_ends_its_workers_when_a_newcomer_that_hears_etcd_asks(
    node: Callable[[str], Node],
) -> None:
    a, b = node("a"), node("b")
    a.knows()
    a.lose_etcd()
    wait_s(FENCING.ttl_s + 0.5)
    assert not a.fence.fell
    wait_until(lambda: b.fence.followed_s > 1.0, "a peer that has followed etcd for a while")
    b.fence.observe(Surroundings(gone={"a": a.address}, has_workers=True))
    wait_until(lambda: has_ended(a.worker), "the end of the worker")


def test_a_fence_that_was_lifted_lets_new_workers_live(node: Callable[[str], Node]) -> None:
    a, b = node("a"), node("b")
    a.fence.observe(Surroundings(NOWHERE, has_workers=True))
    a.lose_etcd()
    wait_until(lambda: a.fence.fell, "the fall")
    a.etcd.silent_at = float("inf")
    a.fence.lift()
    a.knows(b)
    wait_s(0.5)
    assert not a.fence.fell


def test_a_stopped_agent_finds_when_it_goes_on_that_its_workers_have_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        agent.stdout.readline()
        os.kill(agent.pid, signal.SIGSTOP)
        wait_s(4.0)
        os.kill(agent.pid, signal.SIGCONT)
        reason, _, code = agent.stdout.readline().partition("|")
        assert "this agent was stopped for" in reason
        assert int(code) == -signal.SIGKILL
