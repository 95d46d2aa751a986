"""Workers are killed while a job's state is on its way."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from running import ROOT, EtcRun, etcd_of, standalone, steps_of, wait_for_step, wait_until

DYING_JOB = ROOT / "tests" / "scenarios" / "dying_job.py"
Cleanup = Callable[[EtcRun], EtcRun]


def test_a_killed_joiner_costs_nothing_and_a_worker_killed_amid_a_release_a_restart_from_the_checkpoint(
    tmp_path: Path, cleanup: Cleanup
) -> None:
    # A layer's state has 0.31 MB. PP2 to PP3 takes that of three layers on a worker, PP2 to TP2 that of four.
    job = cleanup(
        standalone(
            tmp_path, DYING_JOB, tmp_path, slots=3, options=("--parallel", "PP2TP1DP1", "--max-restarts", 1),
            environment={"ETC_MIGRATION_BUDGET_MB": "1"},
        )
    )
    etcd = etcd_of(job)
    wait_for_step(tmp_path, 3)
    etcd.scale("PP3TP1DP1")
    reply = etcd.reply_to("PP3TP1DP1", "pending", "refused", "done")
    again = r"; it is tried again in 10 s \(timeouts.retry_s\), 1 of 4 times went wrong"
    assert re.fullmatch(rf"\S+/2: pid \d+ was killed by SIGKILL{again}", reply["message"])
    stayed = steps_of(tmp_path)[-1]["step"]
    wait_for_step(tmp_path, stayed + 6)

    etcd.scale("PP1TP2DP1")
    job.wait_for(r"restart 1 of 1: the worker on \S+/1 failed: pid \d+ was killed by SIGKILL")
    wait_until(lambda: steps_of(tmp_path)[-1]["generation"] == 4, "a step of the next life")
    job.wait_for(r"worker 0: .*'\S+' \[.*\].* worker 1 failed")
    assert re.search(r"worker 0 holds [\d,]+ bytes of state and has released its shards of '\S+' \[", job.output)
    saved = max(int(path.stem.rpartition("-")[2]) for path in tmp_path.glob("checkpoint-00000001-*.pt"))
    last = steps_of(tmp_path)[-1]["step"] + 20
    (tmp_path / "last").write_text(str(last))
    assert job.wait() == 0
    job.assert_nothing_left()

    lines = steps_of(tmp_path)
    steps = {number: {line["step"] for line in lines if line["generation"] == number} for number in (1, 4)}
    assert {line["generation"] for line in lines} == set(steps)
    assert saved > stayed, "the job trained on after the first change"
    assert steps[1] == set(range(max(steps[1]) + 1))
    assert steps[4] == set(range(saved, last + 1)), "from the newest checkpoint on"
    assert all(line["seen"] == line["updates"] == [line["step"] + 1] for line in lines), "with the state of that step"
    assert len({line["pid"] for line in lines if line["generation"] == 1}) == 2
