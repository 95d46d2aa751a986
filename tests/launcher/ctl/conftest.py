"""A real etcd with a made-up job in it, and etc-ctl in this process."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.private.server import EtcdServer
from launcher.ctl.main import run


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run of etc-ctl has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object that was printed."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """A JSON object for each line."""
        return [json.loads(line) for line in self.out.splitlines()]


Ctl = Callable[..., Ended]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """What this user has set for etc-ctl does not count."""
    for name in os.environ:
        if name.startswith(("ETC_", "_ETC_CTL")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with EtcdServer() as server:
        yield server.endpoint


@pytest.fixture
def client(endpoint: str) -> Iterator[EtcdClient]:
    with EtcdClient([endpoint]) as client:
        client.delete_prefix("/")
        yield client


@pytest.fixture
def keys(client: EtcdClient) -> JobKeys:
    """A job with a leader, at generation 1, on node a."""
    keys = JobKeys("demo")
    put_job(client, keys)
    return keys


@pytest.fixture
def ctl(endpoint: str) -> Ctl:
    """etc-ctl with these arguments, for the job demo at the etcd of this test unless they say otherwise."""

    def call(*arguments: str, at: str | None = endpoint, run_id: str | None = "demo") -> Ended:
        chosen = [*(["--etcd-endpoints", at] if at else []), *(["--run-id", run_id] if run_id else [])]
        return ctl_bare(*arguments, *chosen)

    return call


def ctl_bare(*arguments: str) -> Ended:
    """etc-ctl with exactly these arguments."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    return Ended(code, out.getvalue(), err.getvalue())


def put(client: EtcdClient, key: str, **fields: Any) -> None:
    """A record as an agent would write it."""
    client.put(key, json.dumps(fields))


def put_job(client: EtcdClient, keys: JobKeys, *nodes: str, config: str = "PP2TP1DP1") -> None:
    """A job that trains with `config` on `nodes` (node a where none are named), 4 slots each."""
    names = nodes or ("a",)
    for name in names:
        put_node(client, keys, name)
    ranks = {"PP2TP1DP1": 2, "PP1TP1DP2": 2, "PP1TP1DP4": 4}[config]
    placement = [f"{names[rank % len(names)]}/{rank // len(names)}" for rank in range(ranks)]
    client.put(keys.leader, names[0])
    put(client, keys.job, incarnation="x", nnodes="1:4", max_restarts=3, started=1_700_000_000.0)
    put(client, keys.current, committed=1, next_id=2)
    put(client, keys.generation(1), id=1, config=config, placement=placement, store="s:1", previous=0, reason="start")
    put(client, keys.history(1), generation=1, config=config, previous=0, reason="start", outcome="committed",
        time=1_700_000_001.0)
    for name in names:
        put(client, keys.ack(1, name), generation=1, node=name, in_session=True, has_stepped=True)
    put(client, keys.status, generation=1, step=7, num_steps=100, config=config, phase="idle", workers=ranks,
        rate_steps_per_s=2.5)


def put_node(client: EtcdClient, keys: JobKeys, name: str, **fields: Any) -> None:
    put(client, keys.node(name), **{
        "name": name, "address": "127.0.0.1", "num_slots": 4, "store_port": 1, "instance": "i", "state": "ready",
        **fields,
    })
