"""top and logs, against a real etcd, a real contact point and real files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etc_agent.agent.safety.contact_point import ContactPoint
from etc_agent.agent.safety.peer_status import Speaker
from etc_agent.reconfig.fencing import PeerStatus
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from tests.launcher.ctl.conftest import Ctl, put, put_job, put_node


@pytest.fixture
def agent() -> Iterator[ContactPoint]:
    """What the agent of node a answers in the run x of the job."""
    point = ContactPoint("127.0.0.1", Speaker("x", "a"), lambda: PeerStatus(0.0, 61.0, True, 42), lambda *_: None)
    yield point
    point.close()


def test_top_asks_each_nodes_agent_for_its_step(
    ctl: Ctl, client: EtcdClient, keys: JobKeys, agent: ContactPoint
) -> None:
    put_job(client, keys, "a", "b")
    put_node(client, keys, "a", contact_port=agent.port, spares=[2, 3])
    put_node(client, keys, "b", contact_port=1)
    nodes = ctl("top", "--once", "-o", "json").json["nodes"]
    assert [(node["step"], node["answers"], node["follows_etcd_s"]) for node in nodes] == [
        (42, True, 61.0), (None, False, None),
    ]
    text = ctl("top", "--once").out
    assert "7 of 100, 2.5 steps/s, 37 s left" in text
    assert "does not answer here" in text
    assert "2-3" in text


def test_another_runs_agent_at_the_same_port_is_not_believed(
    ctl: Ctl, client: EtcdClient, keys: JobKeys, agent: ContactPoint
) -> None:
    put_node(client, keys, "a", contact_port=agent.port)
    put(client, keys.job, incarnation="another")
    assert ctl("top", "--once", "-o", "json").json["nodes"][0]["answers"] is False


def test_top_shows_how_many_nodes_are_ready_for_a_change(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    put_job(client, keys, "a", "b")
    put(client, keys.generation(2), id=2, config="PP1TP1DP4", placement=["a/0", "b/0", "a/1", "b/1"], store="s",
        previous=1, reason="asked for 4")
    put(client, keys.current, committed=1, proposed=2, phase="proposed", next_id=3)
    put(client, keys.ack(2, "a"), generation=2, node="a", prepared="digest")
    assert "1 of 2 nodes" in ctl("top", "--once").out
    assert ctl("explain").out == (
        "Generation 2, PP1TP1DP4 (asked for 4), is prepared beside training: 1 of 2 nodes are ready, b not yet.\n"
    )


def test_top_ends_with_the_job(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    put(client, keys.current, committed=1, outcome="succeeded", why="every worker has finished")
    looks = ctl("top", "-o", "json").lines
    assert [look["state"] for look in looks] == ["succeeded"]


@pytest.fixture
def folder(client: EtcdClient, keys: JobKeys, tmp_path: Path) -> Path:
    """The logs of a job whose rank 1 stayed over the change to generation 2, in which it is rank 0."""
    place = {"config": "PP1TP1DP2", "store": "s", "reason": "x"}
    put(client, keys.generation(1), id=1, placement=["a/0", "a/1"], previous=0, **place)
    put(client, keys.generation(2), id=2, placement=["a/1", "a/2"], previous=1, **place)
    put(client, keys.current, committed=2, next_id=3)
    put(client, keys.ack(2, "a"), generation=2, node="a", in_session=True, logs=str(tmp_path / "job"))
    for name, text in (("generation_1/a/1", "one\ntwo\nthree\n"), ("generation_2/a/1", "joined\n")):
        (tmp_path / "job" / name).mkdir(parents=True)
        (tmp_path / "job" / name / "stdout.log").write_text(text)
    return tmp_path / "job"


def test_the_log_of_a_worker_that_stayed_is_where_it_was_started(ctl: Ctl, folder: Path) -> None:
    assert ctl("logs", "a/0").out == "one\ntwo\nthree\n"
    assert ctl("logs", "a/0", "-n", "1").out == "three\n"
    assert ctl("logs", "a/1").out == "joined\n"
    assert ctl("logs", "a/1", "--generation", "1").out == "one\ntwo\nthree\n"
    (folder / "generation_1/a/1/stderr.log").write_text("warned\n")
    assert ctl("logs", "a/0", "--stream", "stderr").out == "warned\n"
    assert [json.loads(line)["lines"] for line in ctl("logs", "a/0", "-o", "json").out.splitlines()] == [
        ["one", "two", "three"], ["warned"],
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["a/7"], 4, "no rank 7 on node a in generation 2; its ranks are 0, 1"),
        (["b/0"], 4, "no rank 0 on node b in generation 2; it has none"),
        (["a/0", "--generation", "9"], 4, "no generation 9 in job demo; there are 1 to 2"),
        (["a/0", "--stream", "stderr"], 4, "the worker writes to the console of its etc-run"),
        (["a"], 2, "'a' is not a worker; write NODE/RANK"),
    ],
)
def test_a_log_that_is_not_there_is_one_line(
    ctl: Ctl, folder: Path, arguments: list[str], code: int, said: str
) -> None:
    ended = ctl("logs", *arguments)
    assert (ended.code, len(ended.err.splitlines())) == (code, 1)
    assert said in ended.err


def test_a_log_on_another_host_is_named(ctl: Ctl, client: EtcdClient, keys: JobKeys, folder: Path) -> None:
    put(client, keys.ack(2, "a"), generation=2, node="a", in_session=True, logs="/not/here/job")
    said: Any = ctl("logs", "a/0").err
    assert said == "etc-ctl: /not/here/job/generation_1/a/1 is on node a, and not on this host\n"
