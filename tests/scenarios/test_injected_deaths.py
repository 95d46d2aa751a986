"""Workers die at every point of a step and of a change; the survivors go on, bit for bit as if it had been planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from injection import INJECTED_JOB, InjectedRun, check_account, check_bits, options_json
from running import EtcRun, etcd_of, standalone

from tests.worker.injected_job import CHANGE_POINTS, STEP_POINTS, Death

Cleanup = Callable[[EtcRun], EtcRun]


def started(tmp_path: Path, cleanup: Cleanup, full: str, model: str = "gpt", **environment: str) -> InjectedRun:
    folder = tmp_path / "job"
    folder.mkdir()
    (tmp_path / "job.yaml").write_text("failures: {max_per_window: 0}\ntimeouts: {retry_s: 1}\n")
    options = ("--config", tmp_path / "job.yaml", "--parallel", full, "--max-restarts", 0)
    script = (INJECTED_JOB, folder, 1_000_000, 0.01, options_json(model=model))
    job = cleanup(standalone(tmp_path, *script, slots=4, options=options, environment=environment))
    run = InjectedRun(folder, job, etcd_of(job), full)
    run.settle()
    run.etcd.scale(full)
    run.etcd.reply_to(full, "done")
    return run


@pytest.mark.long
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


@pytest.mark.long
def test_deaths_in_a_divided_vote_and_in_a_switch_cost_the_survivors_nothing_but_that_step(
    tmp_path: Path, cleanup: Cleanup
) -> None:
    """The job is kept from growing back, which would take longer than all the rest."""
    run = started(tmp_path, cleanup, "PP1TP1DP4", "ddp")
    run.etcd.put("control/pause", "true")
    run.die_in_step(Death(3, "after_vote", blind=[1]))  # rank 1 does not see the vote that ranks 0 and 2 have seen
    run.full = "PP1TP1DP3"
    run.settle()
    run.etcd.scale(run.full)
    run.etcd.delete("control/pause")
    run.etcd.reply_to(run.full, "done")
    run.die_in_change(Death(0, "before_commit"), "PP1TP1DP2")
    run.full = "PP1TP1DP2"
    run.settle()
    end_and_check(run, tmp_path, "ddp", num_deaths=2)


def end_and_check(run: InjectedRun, tmp_path: Path, model: str, num_deaths: int) -> None:
    last = run.end()
    lines = run.lines()
    assert run.num_deaths == num_deaths
    check_account(lines, run.dead, last, num_deaths)
    check_bits(tmp_path / "replay", lines, run.dead, last, {"model": model})


GPT_DEATHS = [Death((2 * number + number // 2) % 4, point) for number, point in enumerate(STEP_POINTS)]
VOTE_DEATHS = [
    Death(victim, point, blind=[blind])
    for victim, point, blind in ((0, "after_vote", 3), (3, "after_vote", 0), (1, "in_optimizer", 2), (2, "applied", 1))
]
DDP_DEATHS = [
    Death(rank, point)
    for rank, point in ((0, "forward"), (3, "backward"), (1, "reduction"), (2, "in_vote"), (0, "in_optimizer"))
]


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("model", "full", "deaths"),
    [
        ("gpt", "PP2TP1DP2", GPT_DEATHS[:5]), ("gpt", "PP2TP1DP2", GPT_DEATHS[5:]), ("gpt", "PP2TP1DP2", VOTE_DEATHS),
        ("gpt", "PP1TP2DP2", GPT_DEATHS[1:7]), ("ddp", "PP1TP1DP4", DDP_DEATHS),
    ],
    ids=["early", "late", "divided votes", "tensor parallel", "ddp"],
)
def test_a_death_at_any_point_of_a_step(
    tmp_path: Path, cleanup: Cleanup, model: str, full: str, deaths: list[Death]
) -> None:
    run = started(tmp_path, cleanup, full, model)
    for death in deaths:
        run.die_in_step(death)
    run.settle()
    end_and_check(run, tmp_path, model, len(deaths))


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", CHANGE_POINTS)
def test_a_death_at_any_point_of_a_change(tmp_path: Path, cleanup: Cleanup, point: str) -> None:
    """Of rank 0, of a worker of the last stage, of one that leaves, and of one that joins."""
    run = started(tmp_path, cleanup, "PP2TP1DP2")
    for who, config in ((0, "PP1TP2DP2"), (3, "PP2TP1DP2"), ("leaver", "PP1TP1DP2"), ("joiner", "PP2TP1DP2")):
        run.die_in_change(Death(who, point), config)
        run.full = config
        run.settle()
    end_and_check(run, tmp_path, "gpt", 4)
