"""What looking costs does not grow with what jobs have stored: requests and bytes are counted, not time."""

from __future__ import annotations

import pytest
from bench_ctl import fill, measured

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from tests.launcher.ctl.conftest import Ctl, put_node


@pytest.fixture
def large(client: EtcdClient) -> None:
    """120 jobs, one of them of 200 nodes and 40 generations: 3 MB in etcd."""
    fill(client, 120, 200, 40)


def test_a_list_of_many_jobs_takes_few_small_requests(endpoint: str, client: EtcdClient, large: None) -> None:
    cost = measured("list", "--etcd-endpoints", endpoint)
    assert cost["requests"] <= 40
    assert cost["answer_bytes"] < 300_000


def test_the_status_of_a_large_job_is_read_in_a_few_requests(endpoint: str, client: EtcdClient, large: None) -> None:
    cost = measured("status", "--run-id", "large", "--etcd-endpoints", endpoint)
    assert cost["requests"] <= 3
    assert cost["answer_bytes"] < 250_000


def test_of_many_nodes_a_screen_shows_those_that_stand_out(ctl: Ctl, client: EtcdClient, large: None) -> None:
    put_node(client, JobKeys("large"), "node199", state="draining", num_slots=8)
    shown = ctl("status", run_id="large").out
    assert "node199" in shown
    assert "and 160 more nodes; -o json has all" in shown
    assert len(shown.splitlines()) < 70
    assert len(ctl("status", "-o", "json", run_id="large").json["nodes"]) == 200
