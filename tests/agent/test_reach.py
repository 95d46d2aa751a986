"""Agents tell each other in person whether they hear etcd, over real sockets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from waiting import wait_until

from etc_agent.agent.safety.contact_point import ContactPoint
from etc_agent.agent.safety.peer_status import LONGEST_BYTES, Speaker
from etc_agent.agent.safety.reach import Reach
from etc_agent.reconfig.fencing import PeerStatus

JOB = "job"
HOST = "127.0.0.1"
Statuses = dict[str, PeerStatus]
ReachOf = Callable[[Statuses], Reach]

PEER = """
import sys, time
from etc_agent.agent.safety.contact_point import ContactPoint
from etc_agent.agent.safety.peer_status import Speaker
from etc_agent.reconfig.fencing import PeerStatus
point = ContactPoint("127.0.0.1", Speaker("job", "b"), lambda: PeerStatus(0.0, 5.0), lambda node, status: None)
print(point.port, flush=True)
time.sleep(600)
"""


@contextmanager
def contact_point(node: str, followed_s: float, heard: Statuses | None = None, job: str = JOB) -> Iterator[str]:
    """The address of an agent that says this."""
    statuses = {} if heard is None else heard
    point = ContactPoint(HOST, Speaker(job, node), lambda: PeerStatus(0.0, followed_s, True), statuses.__setitem__)
    yield f"{HOST}:{point.port}"
    point.close()


@pytest.fixture
def reach() -> Iterator[ReachOf]:
    """Makes what asks for node a and puts the answers in a dict."""
    with ExitStack() as stack:
        def make(statuses: Statuses) -> Reach:
            made = Reach(
                Speaker(JOB, "a"), lambda: PeerStatus(0.0, 7.0, False), statuses.__setitem__, every_s=0.05,
                timeout_s=0.5,
            )
            stack.callback(made.close)
            return made

        yield make


def test_both_sides_learn_what_the_other_says(reach: ReachOf) -> None:
    answers: Statuses = {}
    callers: Statuses = {}
    begin = time.monotonic()
    with contact_point("b", 3.0, callers) as address:
        reach(answers).want({"b": address}, {})
        wait_until(lambda: answers and callers, "an answer, and what the caller says")
    assert (answers["b"].followed_s, answers["b"].has_workers) == (3.0, True)
    assert (callers["a"].followed_s, callers["a"].has_workers) == (7.0, False)
    assert begin < answers["b"].at <= time.monotonic()


def test_a_stopped_agent_gives_no_answer_though_its_kernel_takes_the_connection(reach: ReachOf) -> None:
    answers: Statuses = {}
    with subprocess.Popen([sys.executable, "-c", PEER], stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        address = (HOST, int(peer.stdout.readline()))
        asking = reach(answers)
        asking.want({"b": f"{HOST}:{address[1]}"}, {})
        wait_until(lambda: answers, "an answer")
        os.kill(peer.pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        socket.create_connection(address, 5.0).close()
        wait_until(lambda: time.monotonic() > stopped_at + 1.5, "several questions")
        assert answers["b"].at < stopped_at + 0.1
        os.kill(peer.pid, signal.SIGCONT)
        wait_until(lambda: answers["b"].at > stopped_at + 1.5, "an answer after it")
        peer.kill()


def test_hundreds_of_nodes_that_do_not_answer_hold_up_none_that_does(reach: ReachOf) -> None:
    answers: Statuses = {}
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server((HOST, 0), backlog=1024))
        asked = {f"n{number}": f"{HOST}:{silent.getsockname()[1]}" for number in range(300)}
        asked |= {name: stack.enter_context(contact_point(name, 1.0)) for name in ("y", "z")}
        reach(answers).want(asked, {})
        for _ in range(2):
            before = time.monotonic()
            wait_until(lambda: all(name in answers and answers[name].at > before for name in "yz"), "two answers", 10.0)  # noqa: B023
    assert set(answers) == {"y", "z"}


def test_nobody_is_asked_before_it_is_wanted_and_names_are_learned_before(reach: ReachOf) -> None:
    answers: Statuses = {}
    callers: Statuses = {}
    with contact_point("b", 1.0, callers) as address:
        asking = reach(answers)
        asking.want({}, {"b": address.replace(HOST, "localhost")})
        wait_until(lambda: "localhost" in asking._addresses, "the address")
        assert not answers
        assert not callers


def test_words_of_another_job_of_oneself_and_what_is_none_do_not_count(reach: ReachOf) -> None:
    answers: Statuses = {}
    callers: Statuses = {}
    with ExitStack() as stack:
        asked = {
            "other job": stack.enter_context(contact_point("c", 1.0, callers, job="other")),
            "oneself": stack.enter_context(contact_point("a", 1.0, callers)),
            "b": (address := stack.enter_context(contact_point("b", 1.0))),
        }
        reach(answers).want(asked, {})
        for nonsense in (b"", b"\n", b"[]\n", b'{"job": "job"}\n', b"x" * 3 * LONGEST_BYTES, b"[" * LONGEST_BYTES):
            with socket.create_connection((HOST, int(address.rpartition(":")[2])), 5.0) as caller:
                caller.sendall(nonsense)
        now = time.monotonic()
        wait_until(lambda: "b" in answers and answers["b"].at > now, "an answer after all that")
    assert set(answers) == {"b"}
    assert not callers


def test_an_address_that_this_host_does_not_have_is_listened_for_on_all(reach: ReachOf) -> None:
    answers: Statuses = {}
    point = ContactPoint("192.0.2.1", Speaker(JOB, "b"), lambda: PeerStatus(0.0, 1.0), {}.__setitem__)
    reach(answers).want({"b": f"{HOST}:{point.port}"}, {})
    wait_until(lambda: answers, "an answer")
    point.close()
