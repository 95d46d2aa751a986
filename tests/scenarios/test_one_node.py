"""A job on one node changes its size while it trains."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from running import ROOT, TINY_JOB, EtcRun, etcd_of, standalone, steps_of, wait_for_step, wait_until

from etc_agent.parallel.config import ParallelConfig
from tests.oracle import assert_same_bits, gathered

Cleanup = Callable[[EtcRun], EtcRun]


def tiny(tmp_path: Path, steps: int, pause_s: float = 0.05, fault: str = "{}", **options: object) -> EtcRun:
    return standalone(tmp_path, TINY_JOB, tmp_path, steps, pause_s, fault, **options)  # type: ignore[arg-type]


def test_a_job_changes_size_four_times_and_nothing_else_changes(tmp_path: Path, cleanup: Cleanup) -> None:
    verify = tmp_path / "verify"
    job = cleanup(
        tiny(tmp_path, 100_000, 0.1, options=("--parallel", "PP2TP1DP1"), environment={"ETC_VERIFY": str(verify)})
    )
    etcd = etcd_of(job)
    wait_for_step(tmp_path, 3)
    configs = ["PP2TP1DP1", "PP2TP2DP1", "PP1TP2DP2", "PP2TP1DP1", "PP1TP1DP4"]
    for config in configs[1:]:
        etcd.scale(config)
        etcd.reply_to(config, "done")
        reached = etcd.get("control/reply")["generation"]
        wait_until(lambda: etcd.get(f"history/{reached}")["stop_ms"] is not None, "its stop time")  # noqa: B023
    histories = [etcd.get(f"history/{generation}") for generation in range(1, 6)]
    last = steps_of(tmp_path)[-1]["step"] + 20  # far enough ahead for every rank to hear of it in time
    (tmp_path / "last.part").write_text(str(last))
    (tmp_path / "last.part").rename(tmp_path / "last")
    assert job.wait() == 0
    job.assert_nothing_left()

    assert [history["config"] for history in histories] == configs
    moves = [(history["kept"], history["started"], history["stopped"]) for history in histories[1:]]
    assert moves == [(2, 2, 0), (4, 0, 0), (2, 0, 2), (2, 2, 0)]
    assert all(history["moved_bytes"] > 0 for history in histories[1:])

    lines = steps_of(tmp_path)
    pids = {number: {line["pid"] for line in lines if line["generation"] == number} for number in range(1, 6)}
    kept = [len(pids[number] & pids[number + 1]) for number in range(1, 5)]
    assert kept == [2, 4, 2, 2], "the workers that stay keep their pids"
    rank_0 = {line["pid"] for line in lines if line["rank"] == 0}
    assert len(rank_0) == 1, "rank 0 stays on its process"

    for generation in range(2, 6):
        before, after = (ParallelConfig.parse(configs[generation - k]).num_ranks for k in (2, 1))
        assert_same_bits(gathered(verify, generation, "old", before), gathered(verify, generation, "new", after))

    seen = {(line["step"], sample) for line in lines for sample in line["ids"]}
    assert seen == {(step, 12 * step + k) for step in range(last + 1) for k in range(12)}, "every sample, once"
    alone = tmp_path / "alone"
    alone.mkdir()
    unchanged = cleanup(tiny(alone, last + 1, 0.0, options=("--parallel", "PP2TP1DP1")))
    assert unchanged.wait() == 0
    reference = {line["step"]: line["loss"] for line in steps_of(alone) if line["rank"] == 0}
    losses = {line["step"]: line["loss"] for line in lines if line["rank"] == 0}
    # Sums over dp and tp come in another order: float32 rounding, over some hundred AdamW steps.
    assert losses == pytest.approx(reference, rel=1e-4)


def test_requests_that_cannot_be_met_are_answered_and_change_nothing(tmp_path: Path, cleanup: Cleanup) -> None:
    job = cleanup(tiny(tmp_path, 100_000, options=("--parallel", "PP2TP1DP1")))
    etcd = etcd_of(job)
    wait_for_step(tmp_path, 3)
    for request, why in {
        "rubbish": "is not a size",
        "PP2TP2DP2": "needs 8 workers, but nnodes admits at most 4",
        "nodes=3": "nnodes admits at most 1",
        "PP1TP1DP5": "needs 5 workers",
        "12": "nnodes admits at most 4",
    }.items():
        etcd.scale(request)
        reply = etcd.reply_to(request, "refused")
        assert why in reply["message"]
        assert "\n" not in reply["message"]
    assert etcd.get("current")["committed"] == 1
    etcd.scale("PP1TP2DP2")
    etcd.scale("PP1TP1DP3")
    etcd.scale("3")  # the last one wins, whichever of the others was begun
    done = etcd.reply_to("3", "done")
    assert ParallelConfig.parse(etcd.get(f"generations/{done['generation']}")["config"]).num_ranks == 3
    step = steps_of(tmp_path)[-1]["step"]
    wait_for_step(tmp_path, step + 5)
    job.send(signal.SIGINT)
    assert job.wait() == 130
    job.assert_nothing_left()


def test_a_training_script_that_raises_ends_the_job_with_its_own_traceback(tmp_path: Path, cleanup: Cleanup) -> None:
    job = cleanup(tiny(tmp_path, 50, 0.0, '{"raise_at": 3}', slots=2))
    assert job.wait() == 1
    assert 'raise KeyError("a bug in user code")' in job.output
    assert any("failed" in line and "a bug in user code" in line for line in job.our_lines())
    job.assert_nothing_left()


def test_the_exit_code_of_a_script_comes_through(tmp_path: Path, cleanup: Cleanup) -> None:
    script = tmp_path / "seven.py"
    script.write_text("import sys; sys.exit(7)")
    job = cleanup(standalone(tmp_path, script, slots=1))
    assert job.wait() == 7
    job.assert_nothing_left()


def test_a_failing_script_is_restarted_as_often_as_it_may(tmp_path: Path, cleanup: Cleanup) -> None:
    script = tmp_path / "thrice.py"
    script.write_text("import os, sys; sys.exit(5 if int(os.environ['TORCHELASTIC_RESTART_COUNT']) < 2 else 0)")
    job = cleanup(standalone(tmp_path, script, slots=2, options=("--max-restarts", 2)))
    assert job.wait() == 0
    assert len([line for line in job.our_lines() if "restart" in line]) == 2


def test_a_script_without_a_session_is_restarted_for_another_size_at_once(tmp_path: Path, cleanup: Cleanup) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(())\n"
        "dist.all_reduce(total)\n"
        "print(f'together {int(total)}', flush=True)\n"
        "time.sleep(600)\n"
    )
    job = cleanup(standalone(tmp_path, script, slots=2, options=("--parallel", "PP1TP1DP1")))
    job.wait_for("together 1")
    etcd_of(job).scale("2")
    job.wait_for("together 2", 60)  # far sooner than a worker may take to open a session
    job.send(signal.SIGINT)
    assert job.wait() == 130


def test_init_process_group_before_the_session_is_refused_in_one_line(tmp_path: Path, cleanup: Cleanup) -> None:
    script = tmp_path / "early.py"
    script.write_text(
        "import torch.distributed as dist, etc_agent as etc\n"
        "dist.init_process_group('gloo')\n"
        "with etc.session(lambda parallel: None, global_batch=2): pass\n"
    )
    job = cleanup(standalone(tmp_path, script, slots=2))
    assert job.wait() == 1
    assert "init_process_group" in "\n".join(job.our_lines())
    job.assert_nothing_left()


def test_a_worker_that_is_killed_is_named_and_the_other_goes_on(tmp_path: Path, cleanup: Cleanup) -> None:
    job = cleanup(tiny(tmp_path, 100_000, slots=2))
    wait_for_step(tmp_path, 3)
    victim, survivor = (next(line["pid"] for line in steps_of(tmp_path) if line["rank"] == rank) for rank in (1, 0))
    os.kill(victim, signal.SIGKILL)
    job.wait_for(r"loss 1: the worker on \S+/1 failed: pid \d+ was killed by SIGKILL")
    job.wait_for(r"generation 2, PP1TP1DP1, trains from step \d+; 1 workers kept")
    wait_until(
        lambda: any(line["pid"] == survivor and line["generation"] >= 2 for line in steps_of(tmp_path)), "more steps"
    )
    job.send(signal.SIGINT)
    assert job.wait() == 130
    job.assert_nothing_left()


def test_a_killed_agent_leaves_no_process_behind(tmp_path: Path, cleanup: Cleanup) -> None:
    job = cleanup(tiny(tmp_path, 100_000, slots=2))
    wait_for_step(tmp_path, 3)
    assert job.descendants()
    job.send(signal.SIGKILL)
    job.wait()
    job.assert_nothing_left()


@pytest.mark.parametrize("phase", ["etcd starts", "workers start", "training", "joiners start", "preparing", "armed"])
def test_ctrl_c_in_every_phase_ends_the_job_cleanly(tmp_path: Path, cleanup: Cleanup, phase: str) -> None:
    job = cleanup(tiny(tmp_path, 100_000, 0.5 if phase == "armed" else 0.02, options=("--parallel", "PP1TP1DP2")))
    if phase == "etcd starts":
        wait_until(job.descendants, "its first child")
    elif phase == "workers start":
        job.wait_for("generation 1, .* starts")
    else:
        wait_for_step(tmp_path, 2)
    if phase in ("joiners start", "preparing", "armed"):
        etcd = etcd_of(job)
        etcd.scale("PP1TP2DP2" if phase == "joiners start" else "PP1TP2DP1")
        job.wait_for("is prepared beside training")
        if phase == "armed":
            wait_until(lambda: etcd.get("current")["phase"] == "armed", "armed")
    job.send(signal.SIGINT)
    assert job.wait(60) == 130
    job.assert_nothing_left()
    assert not [line for line in job.our_lines() if "Traceback" in line]


def test_the_example_of_the_readme_changes_size(tmp_path: Path, cleanup: Cleanup) -> None:
    job = cleanup(standalone(tmp_path, ROOT / "examples" / "data_parallel.py"))
    etcd = etcd_of(job)
    job.wait_for("step +0 ")
    etcd.scale("3")
    assert etcd.reply_to("3", "done", "refused")["result"] == "done"
    job.wait_for("PP1TP1DP3")
    job.send(signal.SIGTERM)
    assert job.wait() == 143
    job.assert_nothing_left()


def test_a_script_that_cannot_start_is_given_up_early_where_that_is_asked_for(tmp_path: Path, cleanup: Cleanup) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import a_module_that_is_not_there")
    (tmp_path / "job.yaml").write_text("alike_failures: 3")
    options = ("--max-restarts", 100, "--config", tmp_path / "job.yaml")
    job = cleanup(standalone(tmp_path, script, slots=1, options=options))
    assert job.wait() == 1
    assert "3 times alike before the first step" in job.our_lines()[-1]
    job.assert_nothing_left()
