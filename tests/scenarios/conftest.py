from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
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
