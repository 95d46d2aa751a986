from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from network import Network
from running import EtcRun

from etc_agent.rendezvous.server import EtcdServer


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
    """Makes networks of so many hosts, which are gone after the test. Where there can be none, it is skipped."""
    if (why := Network.why_not()) is not None:
        pytest.skip(why)
    with ExitStack() as stack:
        yield lambda num_hosts: stack.enter_context(Network(num_hosts))
