"""The user's own commands: what must pass before a node joins, and what says that it is taken away."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from running import (
    TINY_JOB,
    Etcd,
    EtcRun,
    standalone,
    steps_of,
    wait_for_more_steps,
    wait_for_workers,
    wait_until,
)
from test_several_nodes import node, tiny

from etc_agent.rendezvous.private.server import EtcdServer

Cleanup = Callable[[EtcRun], EtcRun]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("sh -c 'echo looking; echo no GPU is here; exit 3'", "failed with exit code 3: .*: no GPU is here; this node"),
        ("sh -c 'sleep 987 & sleep 987'", "has not ended in 0.5 s: .*; this node does not join"),
        ("no-such-program", "cannot be run: no-such-program: No such file"),
    ],
)
def test_a_node_whose_preflight_fails_does_not_join(tmp_path: Path, cleanup: Cleanup, command: str, why: str) -> None:
    job_file = tmp_path / "job.yaml"
    timeout_s = 0.5 if "sleep" in command else 60
    job_file.write_text(f"preflight: {{command: {json.dumps(command)}, timeout_s: {timeout_s}}}")
    job = cleanup(standalone(tmp_path, TINY_JOB, tmp_path, 5, 0.0, slots=1, options=("--config", job_file)))
    assert job.wait() == 1
    (line,) = job.our_lines()
    job.wait_for(why)
    assert "preflight" in line
    job.assert_nothing_left()


def test_a_node_that_is_to_be_taken_away_hands_over_its_state(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    etcd, notice = Etcd(etcd_server.endpoint, "job"), tmp_path / "notice"
    job_file = tmp_path / "job.yaml"
    job_file.write_text(f"preemption: {{command: test -e {notice}, every_s: 0.2, grace_s: 60}}\npreflight: 'true'\n")
    first = cleanup(node(tmp_path, etcd_server, 2, *tiny(tmp_path)))
    second = cleanup(node(tmp_path, etcd_server, 3, "--config", job_file, *tiny(tmp_path)))
    wait_until(lambda: len((etcd.get("status") or {}).get("nodes", ())) == 2, "two nodes")
    wait_for_workers(tmp_path, 2)
    notice.touch()
    second.wait_for("the preemption probe says")
    second.send(signal.SIGTERM)  # the machine is going down: that is no second word of a user
    assert second.wait() == 0
    wait_for_more_steps(tmp_path, 5)
    assert len({line["pid"] for line in steps_of(tmp_path)}) == 2, "no worker was restarted"
    first.send(signal.SIGTERM)
    assert first.wait() == 143


def test_a_probe_that_hangs_is_said_once_drains_nobody_and_leaves_nothing(tmp_path: Path, cleanup: Cleanup) -> None:
    job_file = tmp_path / "job.yaml"
    probe = json.dumps("sh -c 'sleep 987 & sleep 987'")
    job_file.write_text(f"preemption: {{command: {probe}, every_s: 0.1, timeout_s: 0.3}}\nspares: cold\n")
    job = cleanup(standalone(tmp_path, TINY_JOB, tmp_path, 20, 0.05, slots=1, options=("--config", job_file)))
    assert job.wait() == 0
    assert sum("the preemption probe has not ended in 0.3 s" in line for line in job.our_lines()) == 1
    assert "Traceback" not in job.output
    job.assert_nothing_left()
