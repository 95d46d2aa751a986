"""A job that cannot be what it is to be: it says why, tries again what may pass, and says what that has cost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from running import ROOT, TINY_JOB, EtcRun, etcd_of, standalone, wait_for_step, wait_for_workers

Cleanup = Callable[[EtcRun], EtcRun]


def tiny(tmp_path: Path, fault: dict[str, object], slots: int, *options: object) -> EtcRun:
    return standalone(tmp_path, TINY_JOB, tmp_path, 100_000, 0.05, json.dumps(fault), slots=slots, options=options)


def test_a_job_that_its_model_refuses_is_started_once_more_and_not_once_for_every_config(
    tmp_path: Path, cleanup: Cleanup
) -> None:
    job = cleanup(tiny(tmp_path, {"layers": 4}, 5))
    etcd = etcd_of(job)
    wait_for_step(tmp_path, 2)
    starts = [line for line in job.our_lines() if "starts" in line]
    assert [etcd.get(f"generations/{number}")["config"] for number in (1, 2)] == ["PP1TP1DP5", "PP1TP1DP4"]
    assert len(starts) == 2
    assert "a global batch of 12 cannot be divided over dp=5; choose dp from 1, 2, 3, 4, 6, 12" in starts[1]
    etcd.scale("5")
    message = etcd.reply_to("5", "refused")["message"]
    for why in ("a global batch of 12", "12 hidden units cannot be divided over tp=5", "4 layers cannot fill pp=5"):
        assert why in message


def test_a_joiner_that_crashes_costs_a_pause_and_not_the_request(tmp_path: Path, cleanup: Cleanup) -> None:
    fault = {"die_midway": 2, "after": 0.5}
    job = cleanup(tiny(tmp_path, fault, 3, "--parallel", "PP2TP1DP1", "--rdzv-conf", "retry_s=1"))
    etcd = etcd_of(job)
    wait_for_step(tmp_path, 3)
    etcd.scale("PP3TP1DP1")
    assert "was killed by SIGKILL; it is tried again in 1 s" in etcd.reply_to("PP3TP1DP1", "pending")["message"]
    assert etcd.reply_to("PP3TP1DP1", "done", "refused", "restarted")["result"] == "done"
    wait_for_workers(tmp_path, 3)
    assert etcd.get("current")["restarts"] == 0


@pytest.mark.long
def test_a_size_that_is_reached_by_a_restart_is_not_called_done(tmp_path: Path, cleanup: Cleanup) -> None:
    fault = {"die_midway": 1, "after": 0.5}
    job = cleanup(tiny(tmp_path, fault, 3, "--parallel", "PP2TP1DP1", "--max-restarts", 1))
    etcd = etcd_of(job)
    wait_for_step(tmp_path, 3)
    command = ["-m", "launcher.ctl", "scale", "PP3TP1DP1", "--wait", "--run-id", "job"]
    ended = subprocess.run(
        [sys.executable, *command, "--etcd-endpoints", etcd.endpoint], cwd=ROOT, capture_output=True, text=True,
        timeout=120,
    )
    assert ended.returncode == 3, ended.stdout + ended.stderr
    said = ended.stdout.splitlines()[-1]
    assert said.startswith("PP3TP1DP1: restarted (generation 3): the job runs as PP3TP1DP1, but all workers")
    assert "restarted on the way, from step 0: restart 1 of 1: the worker on" in said
    assert "was killed by SIGKILL" in said
