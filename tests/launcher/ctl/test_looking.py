"""The commands that only look, against a real etcd with made-up records."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from tests.launcher.ctl.conftest import Ctl, ctl_bare, put, put_job, put_node

CHANGE = {"generation": 2, "config": "PP2TP2DP1", "previous": 1, "reason": "asked for 4", "outcome": "committed",
          "kept": 2, "started": 2, "moved_bytes": 3 << 20, "stop_ms": 212.0, "phases_ms": {"migrate": 120.0}}


def test_status_is_one_screen_of_everything_that_matters(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    put_node(client, keys, "b", state="draining")
    put(client, keys.history(1), **{**CHANGE, "generation": 1, "time": time.time() - 90})
    put(client, keys.current, committed=1, wanted="4", restarts=1,
        given_up=[{"config": "PP1TP1DP4", "kind": "raised", "why": "a/3: pid 7 was killed by SIGKILL"}])
    put(client, keys.reply, request="4", revision=5, result="pending", message="waiting for nodes", generation=None)
    put(client, keys.pause, why="measuring", by="ada", since=time.time())
    put(client, keys.cordon("a", 3), why="ECC errors", by="ada", since=time.time())
    status = ctl("status", "-o", "json").json
    assert (status["step"], status["num_steps"], status["generation"], status["state"]) == (7, 100, 1, "running")
    assert status["nodes"][0] == {
        "name": "a", "address": "127.0.0.1", "state": "ready", "slots": 4, "ranks": [0, 1], "idle_slots": [2],
        "warm_spares": [], "cordoned": [3], "failure": None,
    }
    assert status["nodes"][1]["state"] == "draining"
    assert (status["restarts"], status["max_restarts"]) == (1, 3)
    assert status["pause"]["by"] == "ada"
    text = ctl("status").out
    for said in (
        "demo: running, paused", "PP2TP1DP1 on 2 workers", "7 of 100, 2.5 steps/s", "1 of 3 used", "by ada",
        "waiting for nodes", "a/3 by ada", "moved 3.0 MiB", "212 ms", "1 min ago", "no worker without a restart",
        "PP1TP1DP4: a/3: pid 7 was killed by SIGKILL",
    ):
        assert said in text, said


def test_status_says_what_the_job_can_lose(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    put_job(client, keys, "a", "b", config="PP1TP1DP2")
    assert ctl("status", "-o", "json").json["survives"] == {"worker": True, "node": True, "known_by": "grid"}
    assert "any one node, if no state is split over dp (ZeRO)" in ctl("status").out
    put(client, keys.status, generation=1, step=7, survives={"worker": False, "node": False, "known_by": "layout"})
    assert "no worker without a restart" in ctl("status").out


def test_nonsense_in_the_pause_key_is_shown_and_pauses_nothing(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    client.put(keys.pause, "ture")
    status = ctl("status", "-o", "json").json
    assert not status["paused"]
    assert status["pause_mistake"].startswith("control/pause: 'ture' is neither true nor false")


def test_history_is_filtered_by_time_outcome_text_and_number(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    put(client, keys.history(2), **{**CHANGE, "time": time.time() - 7200})
    put(client, keys.history(10), **{**CHANGE, "generation": 10, "outcome": "withdrawn", "why": "node b left",
                                     "time": time.time() - 60})

    def generations(*arguments: str) -> list[int]:
        return [record["generation"] for record in ctl("history", "-o", "json", *arguments).lines]

    assert generations() == [1, 2, 10]
    assert generations("--since", "1h") == [10]
    assert generations("--since", "3h") == [2, 10]
    assert generations("--outcome", "withdrawn") == [10]
    assert generations("--grep", "asked for [48]") == [2, 10]
    assert generations("--last", "2") == [2, 10]
    assert [record["generation"] for record in ctl("events", "--json").lines] == [1, 2, 10]
    assert "3.0 MiB" in ctl("history").out
    assert ctl("history", "--grep", "nothing like it").out == "nothing that matches has happened\n"
    assert ctl("history", "--since", "soon").code == 2
    assert ctl("history", "--grep", "(").code == 2


def test_list_shows_every_job_and_filters_by_state(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    put_job(client, JobKeys("demo2"), "a", "b")
    put(client, JobKeys("over").current, committed=1, outcome="failed", why="a/0 raised", exit_code=1)
    put(client, JobKeys("dead").current, committed=1)
    rows = {row["run_id"]: row for row in ctl("list", "-o", "json", run_id=None).lines}
    assert {run_id: row["state"] for run_id, row in rows.items()} == {
        "dead": "gone", "demo": "running", "demo2": "running", "over": "failed",
    }
    assert (rows["demo2"]["nodes"], rows["demo2"]["step"], rows["demo2"]["rate_steps_per_s"]) == (2, 7, 2.5)
    assert [row["run_id"] for row in ctl("list", "--json", "--state", "failed", run_id=None).lines] == ["over"]
    assert "7 of 100" in ctl("list", run_id=None).out
    assert ctl("list", "--state", "held", run_id=None).out == "no jobs under /etc-run are held; there are 4 others\n"
    client.delete_prefix("/etc-run")
    assert ctl("list", run_id=None).out == "no jobs under /etc-run\n"


def test_the_run_id_may_be_left_out_where_there_is_one_job(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    assert ctl("status", run_id=None).code == 0
    client.put(JobKeys("other").leader, "x")
    several = ctl("status", run_id=None)
    assert (several.code, "which job under /etc-run" in several.err) == (2, True)
    unknown = ctl("status", run_id="third")
    assert (unknown.code, "no job third under /etc-run" in unknown.err) == (4, True)


def test_commands_that_look_never_write(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    before = client.get_prefix("/")[1]
    for form in ("text", "json"):
        assert ctl("list", "--output", form, run_id=None).code == 0
        assert ctl_bare("contexts", "--output", form).code == 0
        assert ctl_bare("role", "--run-id", "demo", "--output", form).code == 0
        for arguments in (
            ["status"], ["explain"], ["history"], ["events"], ["wait", "--for", "step=7"], ["top", "--once"],
            ["report", "-o", "/dev/null"],
        ):
            assert ctl(*arguments, "--output", form).code == 0, arguments
        assert ctl("logs", "a/0", "--output", form).code == 4
    assert client.get_prefix("/")[1] == before


def test_an_absent_etcd_is_one_line(ctl: Ctl) -> None:
    ended = ctl("status", "--etcd-timeout", "0.3", at="127.0.0.1:1")
    assert ended.code == 7
    assert ended.err.startswith("etc-ctl: etcd does not answer at 127.0.0.1:1")
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["scale"], "Missing argument 'VALUE'; see etc-ctl scale --help"),
        (["sacle", "8"], "No such command 'sacle'"),
        (["status", "--etcd-user", "ada"], "--etcd-user ada: no password; set ETC_PASSWORD"),
        (["wait", "--for", "steps=3"], "write state=STATE, config=PP4TP2DP2 or step=1000"),
        (["wait", "--for", "state=fine"], "'fine' is no state; write one of starting, running"),
        (["status", "--etcd-endpoints", "x:y"], "'x:y' is not an etcd server"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(arguments: list[str], said: str) -> None:
    ended = ctl_bare(*arguments)
    assert ended.code in (1, 2)
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1


def test_help_needs_no_job_and_every_command_gives_examples() -> None:
    shown = ctl_bare("--help").out
    assert "What a change would move." in shown
    commands = [line.split()[0] for line in shown.partition("Commands:\n")[2].splitlines()]
    assert len(commands) >= 15
    for command in commands:
        text = ctl_bare(command, "--help").out
        assert command == "plan" or f"etc-ctl {command}" in text or command == "events", command


def test_the_shell_completes_commands() -> None:
    program = [sys.executable, "-c", "import sys, launcher.ctl; sys.argv[0] = 'etc-ctl'; sys.exit(launcher.ctl.main())"]
    environment = {"_ETC_CTL_COMPLETE": "bash_complete", "COMP_WORDS": "etc-ctl unco", "COMP_CWORD": "1"}
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert ended.stdout == "plain,uncordon\n"
