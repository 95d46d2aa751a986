from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from network import Network
from running import EtcRun

from etc_agent.rendezvous.private.server import EtcdServer


@pytest.fixture
def cleanup() -> Iterator[Callable[[EtcRun], EtcRun]]:
    """Registers a job so that nothing of it outlives the test."""
    jobs: list[EtcRun] = []

    def register(job: EtcRun) -> EtcRun:
        jobs.append(job)
        return job

    yield register
    for job in jobs:
        job.kill()


@pytest.fixture
def etcd_server() -> Iterator[Any]:
    with EtcdServer() as server:
        yield server


@pytest.fixture
def make_network() -> Iterator[Callable[[int], Network]]:
    """Makes networks of so many hosts, which are gone after the test. Only who may not make any is excused: all else
    that stands in the way, a missing ``ip`` too, is a failure."""
    why = Network.why_not()
    if why is not None and ("need root" in why or "not permitted" in why):
        pytest.skip(why)
    assert why is None, why
    with ExitStack() as stack:
        yield lambda num_hosts: stack.enter_context(Network(num_hosts))
