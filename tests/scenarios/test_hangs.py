"""A worker that hangs is found by lack of progress, named, and its stacks are in the log."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from running import TINY_JOB, EtcRun, etcd_of, standalone, steps_of, wait_for_more_steps, wait_for_step

Cleanup = Callable[[EtcRun], EtcRun]
SOON = ("--rdzv-conf", "hang_s=2,start_s=60")


def test_a_rank_that_hangs_is_named_its_stacks_are_written_and_it_alone_is_killed(
    tmp_path: Path, cleanup: Cleanup
) -> None:
    job = cleanup(standalone(tmp_path, TINY_JOB, tmp_path, 40, 0.02, '{"hang_at": 5}', slots=2, options=SOON))
    job.wait_for(rf"the worker on \S+/1, rank 1, hangs in step 5, generation 1, at {TINY_JOB}:\d+; the survivors go on")
    assert job.wait() == 0
    named = next(number for number, line in enumerate(job.lines) if "the survivors go on" in line)
    written = [number for number, line in enumerate(job.lines) if "time.sleep" in line or 'File "' in line]
    assert written
    assert written[0] < named, "stacks come before anything is killed"
    assert_all_steps_once_by_the_survivor(tmp_path, 40)
    job.assert_nothing_left()


def test_a_stopped_worker_is_named_and_killed_and_the_others_go_on(tmp_path: Path, cleanup: Cleanup) -> None:
    job = cleanup(standalone(tmp_path, TINY_JOB, tmp_path, 100_000, 0.02, slots=2, options=SOON))
    wait_for_step(tmp_path, 3)
    victim = next(line["pid"] for line in steps_of(tmp_path) if line["rank"] == 1)
    os.kill(victim, signal.SIGSTOP)
    job.wait_for(rf"the worker on \S+/1, rank 1, hangs: pid {victim} is stopped \(SIGSTOP\); the survivors go on", 60.0)
    wait_for_more_steps(tmp_path, 5)
    assert etcd_of(job).get("current")["restarts"] == 0
    assert_all_steps_once_by_the_survivor(tmp_path, max(line["step"] for line in steps_of(tmp_path)))
    job.send(signal.SIGINT)
    assert job.wait() == 130
    job.assert_nothing_left()


def assert_all_steps_once_by_the_survivor(folder: Path, count: int) -> None:
    """The worker of rank 0 is the same process to the end, and each step took each sample once."""
    lines = [line for line in steps_of(folder) if line["step"] < count]
    assert len({line["pid"] for line in lines if line["rank"] == 0}) == 1
    ids = sorted((line["step"], sample) for line in lines for sample in line["ids"])
    assert ids == [(step, 12 * step + k) for step in range(count) for k in range(12)]


def test_a_plain_script_is_judged_only_once_it_sends_heartbeats(tmp_path: Path, cleanup: Cleanup) -> None:
    quiet, beating = tmp_path / "quiet.py", tmp_path / "beating.py"
    quiet.write_text("import time; time.sleep(6)")
    beating.write_text("import time, etc_agent; etc_agent.heartbeat(); time.sleep(600)")
    silent = cleanup(standalone(tmp_path, quiet, slots=1, options=SOON))
    job = cleanup(standalone(tmp_path, beating, slots=1, options=SOON))
    assert job.wait() == 1
    assert "has sent no heartbeat since number 1" in job.our_lines()[-1]
    assert f'File "{beating}", line 1' in job.output
    assert silent.wait() == 0
