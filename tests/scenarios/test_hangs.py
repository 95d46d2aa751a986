"""A worker that hangs is found by lack of progress, named, and its stacks are in the log."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from running import TINY_JOB, EtcRun, standalone, steps_of, wait_for_step

Cleanup = Callable[[EtcRun], EtcRun]
SOON = ("--rdzv-conf", "hang_s=2,start_s=60")


def test_a_rank_that_hangs_is_named_and_stacks_are_written_first(tmp_path: Path, cleanup: Cleanup) -> None:
    job = cleanup(standalone(tmp_path, TINY_JOB, tmp_path, 1000, 0.02, '{"hang_at": 5}', slots=2, options=SOON))
    assert job.wait() == 1
    assert "the worker on" in (end := job.our_lines()[-1])
    assert "/1, rank 1, hangs in step 5" in end
    assert f"{TINY_JOB}:" in end
    written = [number for number, line in enumerate(job.lines) if "time.sleep" in line or 'File "' in line]
    assert written
    assert written[0] < job.lines.index(end), "stacks come before anything is killed"
    job.assert_nothing_left()


def test_a_stopped_worker_is_named_and_the_job_starts_anew(tmp_path: Path, cleanup: Cleanup) -> None:
    options = (*SOON, "--max-restarts", 1)
    job = cleanup(standalone(tmp_path, TINY_JOB, tmp_path, 100_000, 0.02, slots=2, options=options))
    wait_for_step(tmp_path, 3)
    victim = next(line["pid"] for line in steps_of(tmp_path) if line["rank"] == 1)
    os.kill(victim, signal.SIGSTOP)
    job.wait_for(rf"restart 1 of 1: the worker on \S+/1, rank 1, hangs: pid {victim} is stopped \(SIGSTOP\)")
    job.send(signal.SIGINT)
    assert job.wait() == 130
    job.assert_nothing_left()


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
