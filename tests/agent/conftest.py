from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.private.server import EtcdServer

_runs = itertools.count()


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[EtcdServer]:
    """For tests that leave etcd itself alone."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def client(shared_etcd: EtcdServer) -> Iterator[EtcdClient]:
    with EtcdClient([shared_etcd.endpoint]) as client:
        yield client


@pytest.fixture
def keys() -> JobKeys:
    return JobKeys(f"run{next(_runs)}")
