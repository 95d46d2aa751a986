"""The commands that write, against a real etcd. The test writes what a leader would write."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.mirror import Mirror, Snapshot
from tests.launcher.ctl.conftest import Ctl, put


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
    ctl: Ctl, client: EtcdClient, keys: JobKeys
) -> None:
    with Leader(client, keys, ("accepted", 2, "changing to PP2TP2DP1")):
        ended = ctl("scale", "PP2TP2DP1")
    assert (ended.code, ended.out) == (0, "PP2TP2DP1: accepted (generation 2): changing to PP2TP2DP1\n")
    written = client.get("/etc-run/demo/control/scale")
    assert written is not None
    assert written.value == b"PP2TP2DP1"


def test_scale_with_wait_returns_when_it_is_done(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    with Leader(client, keys, ("pending", None, "waiting for nodes"), ("done", 3, "the job runs as DP8")):
        ended = ctl("scale", "8", "--wait")
    assert ended.code == 0
    assert ended.out.endswith("8: done (generation 3): the job runs as DP8\n")


def test_a_refused_request_says_why_and_exits_1(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    with Leader(client, keys, ("refused", None, "nnodes admits 4 slots")):
        ended = ctl("scale", "nodes=9", "--wait")
    assert (ended.code, ended.out) == (1, "nodes=9: refused: nnodes admits 4 slots\n")


def test_a_size_that_is_reached_by_a_restart_has_an_exit_code_of_its_own(
    ctl: Ctl, client: EtcdClient, keys: JobKeys
) -> None:
    said = "the job runs as DP8, but all workers were restarted on the way, from step 40: node b was lost"
    with Leader(client, keys, ("accepted", 2, "changing to DP8"), ("restarted", 3, said)):
        ended = ctl("scale", "8", "--wait")
    assert (ended.code, ended.out.splitlines()[-1]) == (3, f"8: restarted (generation 3): {said}")


def test_nonsense_is_refused_before_anything_is_written(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    ended = ctl("scale", "big", at="127.0.0.1:1")  # the value is looked at before etcd is asked for
    assert ended.code == 2
    assert ended.err.startswith("etc-ctl: 'big' is not a size; write a number of workers (8)")
    assert client.get(keys.scale) is None


def _superseded(client: EtcdClient, keys: JobKeys) -> None:
    client.put(keys.current, json.dumps({"committed": 1, "handled_scale": 1 << 40}))


def _ended(client: EtcdClient, keys: JobKeys) -> None:
    client.put(keys.current, json.dumps({"committed": 1, "outcome": "failed", "why": "worker a/0 raised"}))


def _silent(client: EtcdClient, keys: JobKeys) -> None:
    pass


@pytest.mark.parametrize(
    ("happens", "code", "said"),
    [
        (_superseded, 1, "a newer request has taken the place of 8"),
        (_ended, 6, "job demo has failed: worker a/0 raised"),
        (_silent, 5, "no leader answered within 0.3 s (--timeout)"),
    ],
)
def test_a_request_that_gets_no_answer_of_its_own_ends_in_one_line(
    ctl: Ctl, client: EtcdClient, keys: JobKeys, happens: Callable[[EtcdClient, JobKeys], None], code: int,
    said: str,
) -> None:
    happens(client, keys)
    ended = ctl("scale", "8", "--timeout", "0.3")
    assert ended.code == code
    assert ended.err.startswith(f"etc-ctl: {said}")
    assert len(ended.err.splitlines()) == 1


def test_while_paused_a_request_is_written_and_waits(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    assert ctl("pause", "--why", "measuring").code == 0
    written = client.get(keys.pause)
    assert written is not None
    assert set(written.json()) == {"why", "by", "since"}
    ended = ctl("scale", "8")
    assert (ended.code, ended.out) == (0, "the job is paused; 8 waits for etc-ctl resume\n")
    assert client.get(keys.scale) is not None
    assert ctl("resume").out == "job demo may change its size again\n"
    assert client.get(keys.pause) is None
    assert ctl("resume", "-o", "json").json == {"run_id": "demo", "paused": False, "was_paused": False}


def test_a_job_that_has_ended_is_not_paused(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    _ended(client, keys)
    ended = ctl("pause")
    assert (ended.code, ended.err) == (6, "etc-ctl: job demo has failed: worker a/0 raised\n")
    assert client.get(keys.pause) is None


def test_drain_asks_a_node_that_exists_and_waits_until_it_has_left(
    ctl: Ctl, client: EtcdClient, keys: JobKeys
) -> None:
    assert "no node b in job demo; there are a" in ctl("drain", "b").err
    assert ctl("drain", "a", "--deadline", "60").out == "node a is asked to leave\n"
    asked = client.get(keys.drain("a"))
    assert asked is not None
    assert asked.value == b"60"
    mirror = Mirror(client, keys.root)

    def leave(now: Snapshot) -> bool:
        return now[keys.drain("a")].value == b""

    leaver = threading.Thread(target=lambda: mirror.wait_for(leave, 20) and client.delete(keys.node("a")))
    leaver.start()
    assert ctl("drain", "a", "--wait").out == "node a has left\n"
    leaver.join(20)
    mirror.close()


def test_every_answer_to_a_request_is_a_json_object(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    with Leader(client, keys, ("pending", None, "waiting for nodes"), ("done", 3, "the job runs as DP8")):
        ended = ctl("scale", "8", "--wait", "-o", "json")
    assert ended.lines[-1]["result"] == "done"
    assert ended.lines[-1]["generation"] == 3


def test_a_cordon_is_a_key_with_reason_author_and_time(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    assert ctl("cordon", "a/3", "--why", "ECC errors").out == "a/3 is cordoned: it takes no new workers\n"
    assert "it counts when one joins" in ctl("cordon", "later").out
    written = client.get("/etc-run/demo/control/cordon/a/3")
    assert written is not None
    assert written.json()["why"] == "ECC errors"
    assert written.json()["since"] > 1e9
    assert client.get("/etc-run/demo/control/cordon/later") is not None
    assert ctl("uncordon", "a/3").out == "a/3 may take workers again\n"
    assert client.get("/etc-run/demo/control/cordon/a/3") is None


def test_what_cannot_be_cordoned_is_one_line(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    for arguments, code, said in (
        (("cordon", "a/4"), 4, "node a has no slot 4; it has 4, from 0 on"),
        (("cordon", "a/x"), 2, "'a/x' is not a node or a slot; write NODE or NODE/INDEX"),
        (("uncordon", "a"), 4, "a is not cordoned; cordoned is nothing"),
    ):
        ended = ctl(*arguments)
        assert (ended.code, ended.err[:9]) == (code, "etc-ctl: ")
        assert said in ended.err
    assert client.get_prefix(keys.cordons_prefix)[0] == []


def test_stop_writes_the_order_and_waits_for_the_end(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    mirror = Mirror(client, keys.root)

    def end() -> None:
        assert mirror.wait_for(lambda now: keys.stop in now and now[keys.stop].json()["why"] == "enough", 20)
        put(client, keys.current, committed=1, outcome="stopped", exit_code=143, why="an administrator stopped it")

    leader = threading.Thread(target=end)
    leader.start()
    assert ctl("stop").out == "job demo is told to stop\n"
    assert ctl("stop", "--why", "enough", "--wait").out == "job demo has stopped\n"
    leader.join(20)
    mirror.close()
    assert ctl("stop").code == 6


def test_an_empty_size_is_a_mistake_since_a_variable_was_not_set(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    for empty in ("", " "):
        ended = ctl("scale", empty, at="127.0.0.1:1")
        assert ended.code == 2
        assert "is not a size; write a number of workers (8)" in ended.err
    assert client.get(keys.scale) is None
