"""etc-ctl against a real etcd. The test writes what a leader would write."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.mirror import Mirror, Snapshot
from etc_agent.rendezvous.private.server import EtcdServer


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
    node = {"name": "a", "address": "127.0.0.1", "num_slots": 4, "store_port": 1, "instance": "i", "state": "ready"}
    client.put(keys.leader, "a")
    client.put(keys.node("a"), json.dumps(node))
    client.put(keys.current, json.dumps({"committed": 1, "next_id": 2}))
    client.put(keys.status, json.dumps({"step": 7, "config": "PP2TP1DP1", "phase": "idle", "workers": 2}))
    return keys


def ctl(endpoint: str, *arguments: str, run_id: str | None = "demo") -> subprocess.CompletedProcess[str]:
    chosen = ["--run-id", run_id] if run_id else []
    command = [sys.executable, "-m", "launcher.ctl", *arguments, "--etcd-endpoints", endpoint, *chosen]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


class Leader:
    """Answers each written `control/scale` with the given results, one after the other."""

    def __init__(self, client: EtcdClient, keys: JobKeys, *results: tuple[str, int | None, str]) -> None:
        self.client, self.keys, self.results = client, keys, results
        self.mirror = Mirror(client, keys.root)
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> Leader:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.mirror.close()
        self.thread.join(10)

    def _run(self) -> None:
        if not self.mirror.wait_for(lambda now: self.keys.scale in now, 20):
            return
        asked = self.mirror.snapshot()[self.keys.scale]
        for result, generation, message in self.results:
            reply = {"request": asked.text, "revision": asked.mod_revision, "result": result, "message": message,
                     "generation": generation}
            self.client.put(self.keys.reply, json.dumps(reply))


def test_scale_writes_the_plain_key_and_prints_the_leaders_answer(
    endpoint: str, client: EtcdClient, keys: JobKeys
) -> None:
    with Leader(client, keys, ("accepted", 2, "changing to PP2TP2DP1")):
        ended = ctl(endpoint, "scale", "PP2TP2DP1")
    assert (ended.returncode, ended.stdout) == (0, "PP2TP2DP1: accepted (generation 2): changing to PP2TP2DP1\n")
    written = client.get("/etc-run/demo/control/scale")
    assert written is not None
    assert written.value == b"PP2TP2DP1"


def test_scale_with_wait_returns_when_it_is_done(endpoint: str, client: EtcdClient, keys: JobKeys) -> None:
    with Leader(client, keys, ("pending", None, "waiting for nodes"), ("done", 3, "the job runs as DP8")):
        ended = ctl(endpoint, "scale", "8", "--wait")
    assert ended.returncode == 0
    assert ended.stdout.endswith("8: done (generation 3): the job runs as DP8\n")


def test_a_refused_request_says_why_and_exits_1(endpoint: str, client: EtcdClient, keys: JobKeys) -> None:
    with Leader(client, keys, ("refused", None, "nnodes admits 4 slots")):
        ended = ctl(endpoint, "scale", "nodes=9", "--wait")
    assert (ended.returncode, ended.stdout) == (1, "nodes=9: refused: nnodes admits 4 slots\n")


def test_a_size_that_is_reached_by_a_restart_has_an_exit_code_of_its_own(
    endpoint: str, client: EtcdClient, keys: JobKeys
) -> None:
    said = "the job runs as DP8, but all workers were restarted on the way, from step 40: node b was lost"
    with Leader(client, keys, ("accepted", 2, "changing to DP8"), ("restarted", 3, said)):
        ended = ctl(endpoint, "scale", "8", "--wait")
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (3, f"8: restarted (generation 3): {said}")


def test_nonsense_is_refused_before_anything_is_written(endpoint: str, client: EtcdClient, keys: JobKeys) -> None:
    ended = ctl(endpoint, "scale", "big")
    assert ended.returncode == 1
    assert ended.stderr.startswith("etc-ctl: 'big' is not a size; write a number of workers (8)")
    assert client.get(keys.scale) is None


def _superseded(client: EtcdClient, keys: JobKeys) -> None:
    client.put(keys.current, json.dumps({"committed": 1, "handled_scale": 1 << 40}))


def _ended(client: EtcdClient, keys: JobKeys) -> None:
    client.put(keys.current, json.dumps({"committed": 1, "outcome": "failed", "why": "worker a/0 raised"}))


def _silent(client: EtcdClient, keys: JobKeys) -> None:
    pass


@pytest.mark.parametrize(
    ("happens", "said"),
    [
        (_superseded, "a newer request has taken the place of 8"),
        (_ended, "job demo has failed: worker a/0 raised"),
        (_silent, "no leader answered within 1 s (--timeout)"),
    ],
)
def test_a_request_that_gets_no_answer_of_its_own_ends_in_one_line(
    endpoint: str, client: EtcdClient, keys: JobKeys, happens: Callable[[EtcdClient, JobKeys], None], said: str
) -> None:
    happens(client, keys)
    ended = ctl(endpoint, "scale", "8", "--timeout", "1")
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"etc-ctl: {said}")
    assert len(ended.stderr.splitlines()) == 1


def test_while_paused_a_request_is_written_and_waits(endpoint: str, client: EtcdClient, keys: JobKeys) -> None:
    assert ctl(endpoint, "pause").returncode == 0
    assert client.get(keys.pause) is not None
    ended = ctl(endpoint, "scale", "8")
    assert (ended.returncode, ended.stdout) == (0, "the job is paused; 8 waits for etc-ctl resume\n")
    assert client.get(keys.scale) is not None
    assert ctl(endpoint, "resume").returncode == 0
    assert client.get(keys.pause) is None


def test_a_job_that_has_ended_is_not_paused(endpoint: str, client: EtcdClient, keys: JobKeys) -> None:
    _ended(client, keys)
    ended = ctl(endpoint, "pause")
    assert (ended.returncode, ended.stderr) == (1, "etc-ctl: job demo has failed: worker a/0 raised\n")
    assert client.get(keys.pause) is None


def test_drain_asks_a_node_that_exists_and_waits_until_it_has_left(
    endpoint: str, client: EtcdClient, keys: JobKeys
) -> None:
    assert "no node b in job demo; there are a" in ctl(endpoint, "drain", "b").stderr
    assert ctl(endpoint, "drain", "a", "--deadline", "60").stdout == "node a is asked to leave\n"
    asked = client.get(keys.drain("a"))
    assert asked is not None
    assert asked.value == b"60"
    mirror = Mirror(client, keys.root)

    def leave(now: Snapshot) -> bool:
        return now[keys.drain("a")].value == b""

    leaver = threading.Thread(target=lambda: mirror.wait_for(leave, 20) and client.delete(keys.node("a")))
    leaver.start()
    assert ctl(endpoint, "drain", "a", "--wait").stdout == "node a has left\n"
    leaver.join(20)
    mirror.close()


def test_status_and_events_show_what_the_leader_wrote(endpoint: str, client: EtcdClient, keys: JobKeys) -> None:
    record = {"generation": 2, "config": "PP2TP2DP1", "previous": 1, "reason": "asked for 4", "outcome": "committed",
              "kept": 2, "started": 2, "moved_bytes": 3 << 20, "stop_ms": 212.0, "phases_ms": {"migrate": 120.0}}
    client.put(keys.history(10), json.dumps({**record, "generation": 10}))
    client.put(keys.history(2), json.dumps(record))
    status = json.loads(ctl(endpoint, "status", "--json").stdout)
    assert (status["step"], status["generation"], status["nodes"]) == (7, 1, ["a (4 slots, ready)"])
    assert "PP2TP1DP1" in ctl(endpoint, "status").stdout
    given_up = {"config": "PP1TP1DP4", "kind": "raised", "why": "a/3: pid 7 was killed by SIGKILL"}
    client.put(keys.current, json.dumps({"committed": 1, "given_up": [given_up]}))
    status = json.loads(ctl(endpoint, "status", "--json").stdout)
    assert status["given_up"] == ["PP1TP1DP4: a/3: pid 7 was killed by SIGKILL"]
    generations = [json.loads(line)["generation"] for line in ctl(endpoint, "events", "--json").stdout.splitlines()]
    assert generations == [2, 10]
    assert "3.0 MiB" in ctl(endpoint, "events").stdout


def test_help_needs_no_job() -> None:
    command = [sys.executable, "-m", "launcher.ctl", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    assert "plan    What a change would move." in shown


def test_the_run_id_may_be_left_out_where_there_is_one_job(endpoint: str, client: EtcdClient, keys: JobKeys) -> None:
    assert ctl(endpoint, "status", run_id=None).returncode == 0
    client.put(JobKeys("other").leader, "x")
    assert "which job under /etc-run" in ctl(endpoint, "status", run_id=None).stderr
    assert "no job third under /etc-run" in ctl(endpoint, "status", run_id="third").stderr


def test_an_absent_etcd_is_one_line(endpoint: str) -> None:
    ended = ctl("127.0.0.1:1", "status", "--etcd-timeout", "1")
    assert ended.returncode == 1
    assert ended.stderr.startswith("etc-ctl: etcd does not answer at 127.0.0.1:1")
    assert len(ended.stderr.splitlines()) == 1
