"""Workers die at every point of a step and of a change; the survivors go on, bit for bit as if it had been planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from injection import INJECTED_JOB, InjectedRun, check_account, check_bits, options_json
from running import EtcRun, etcd_of, standalone

from tests.worker.injected_job import Death

Cleanup = Callable[[EtcRun], EtcRun]


def started(tmp_path: Path, cleanup: Cleanup, full: str, model: str = "gpt", **environment: str) -> InjectedRun:
    folder = tmp_path / "job"
    folder.mkdir()
    (tmp_path / "job.yaml").write_text("failures: {max_per_window: 0}\n")
    options = ("--config", tmp_path / "job.yaml", "--parallel", full, "--max-restarts", 0)
    script = (INJECTED_JOB, folder, 1_000_000, 0.01, options_json(model=model))
    job = cleanup(standalone(tmp_path, *script, slots=4, options=options, environment=environment))
    run = InjectedRun(folder, job, etcd_of(job), full)
    run.settle()
    run.etcd.scale(full)
    run.etcd.reply_to(full, "done")
    return run


def test_planned_changes_alone_are_as_the_replay_of_them(tmp_path: Path, cleanup: Cleanup) -> None:
    run = started(tmp_path, cleanup, "PP2TP1DP2")
    for config in ("PP3TP1DP1", "PP2TP1DP2"):
        run.etcd.scale(config)
        run.etcd.reply_to(config, "done")
        run.settle(config)
    last = run.end()
    check_account(run.lines(), run.dead, last)
    legs = check_bits(tmp_path / "replay", run.lines(), run.dead, last, {"model": "gpt"})
    assert [leg.config for leg in legs] == ["PP2TP1DP2", "PP3TP1DP1", "PP2TP1DP2"]


IN_STEPS = [
    Death(0, "forward"), Death(2, "backward"), Death(3, "after_vote", blind=[1]), Death(1, "in_optimizer"),
]


@pytest.mark.long
def test_deaths_in_a_step_cost_the_survivors_at_most_that_step(tmp_path: Path, cleanup: Cleanup) -> None:
    run = started(tmp_path, cleanup, "PP2TP1DP2")
    for death in IN_STEPS:
        run.die_in_step(death)
        run.settle()
    last = run.end()
    assert len(run.dead) == len(IN_STEPS)
    check_account(run.lines(), run.dead, last)
    check_bits(tmp_path / "replay", run.lines(), run.dead, last, {"model": "gpt"})
