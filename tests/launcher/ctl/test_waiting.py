"""etc-ctl wait: until a state, a config or a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from tests.launcher.ctl.conftest import Ctl, put


def _step(client: EtcdClient, keys: JobKeys) -> None:
    put(client, keys.status, generation=1, step=8)


def _end(client: EtcdClient, keys: JobKeys) -> None:
    put(client, keys.current, committed=1, outcome="failed", exit_code=1, why="a/0 raised")


def _change(client: EtcdClient, keys: JobKeys) -> None:
    put(client, keys.generation(2), id=2, config="DP2", placement=["a/0", "a/1"], store="s", previous=1, reason="x")
    put(client, keys.current, committed=2)


@pytest.mark.parametrize(
    ("goal", "happens"),
    [("step=8", _step), ("state=failed", _end), ("state=ended", _end), ("config=DP2", _change)],
)
def test_wait_returns_when_it_is_so(
    ctl: Ctl, client: EtcdClient, keys: JobKeys, goal: str, happens: Callable[[EtcdClient, JobKeys], None]
) -> None:
    ended: list[Any] = []
    waiter = threading.Thread(target=lambda: ended.append(ctl("wait", "--for", goal, "--timeout", "20", "-o", "json")))
    waiter.start()
    happens(client, keys)
    waiter.join(30)
    assert ended[0].code == 0
    assert ended[0].json["for"] == goal


def test_what_does_not_come_in_time_has_an_exit_code_of_its_own(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    ended = ctl("wait", "--for", "step=8", "--timeout", "0.2")
    assert (ended.code, ended.err) == (5, "etc-ctl: not step=8 within 0.2 s (--timeout); the job is running\n")


def test_a_job_that_ends_otherwise_ends_the_wait(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    _end(client, keys)
    ended = ctl("wait", "--for", "state=succeeded")
    assert (ended.code, ended.err) == (6, "etc-ctl: job demo has failed: a/0 raised; it is not state=succeeded\n")
