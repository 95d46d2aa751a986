"""Checkpoints of jobs under etc-run: everything dies at once, and the job goes on from the newest complete one."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import TINY_JOB, EtcRun, etcd_of, standalone, steps_of, wait_for_step, wait_for_workers, wait_until

from etc_agent.rendezvous.private.server import EtcdServer
from etc_agent.worker.checkpoints.folder import METADATA, check, is_complete, newest_first

Cleanup = Callable[[EtcRun], EtcRun]


def job(tmp_path: Path, log: Path, config: str, checkpoint: str, **options: object) -> EtcRun:
    """A tiny job whose job file has this `checkpoint` section; its steps are logged in the folder `log`."""
    log.mkdir()
    (tmp_path / "job.yaml").write_text(f"checkpoint: {{folder: saved, {checkpoint}}}\n")
    arguments = ("--config", tmp_path / "job.yaml", "--parallel", config, *options.pop("options", ()))  # type: ignore[misc]
    script = (TINY_JOB, log, 100_000, 0.05, json.dumps(options.pop("fault", {})))
    return standalone(tmp_path, *script, options=arguments, **options)  # type: ignore[arg-type]


def kill_all(started: EtcRun) -> None:
    """Everything at once, as when the machine's power fails."""
    for pid in (started.process.pid, *started.descendants()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    started.wait()


def losses(log: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in steps_of(log) if line["rank"] == 0}


def wait_for_checkpoint(folder: Path, step: int) -> Path:
    """The newest complete checkpoint, once it is of that step or a later one."""

    def found() -> Path | None:
        return next((path for path in newest_first(folder) if is_complete(path) and check(path).step >= step), None)

    return wait_until(found, f"a checkpoint of step {step}")


def ask_to_end(log: Path, num_steps: int) -> int:
    last = steps_of(log)[-1]["step"] + num_steps
    (log / "last.part").write_text(str(last))
    (log / "last.part").rename(log / "last")
    return last


def test_when_everything_is_killed_a_job_of_another_size_goes_on_from_the_newest_checkpoint(
    tmp_path: Path, cleanup: Cleanup
) -> None:
    folder, first, second = tmp_path / "saved", tmp_path / "first", tmp_path / "second"
    slow = {"slow_flush_s": 0.3}
    started = cleanup(job(tmp_path, first, "PP2TP1DP2", "every_steps: 10, keep: 2", fault=slow))
    wait_for_checkpoint(folder, 20)
    wait_until(lambda: list(folder.glob(".step-*/*.distcp")), "a checkpoint that is being written")
    kill_all(started)
    assert list(folder.glob(".step-*")), "it was not written to its end"
    step = check(next(path for path in newest_first(folder) if is_complete(path))).step
    reached = steps_of(first)[-1]["step"]

    started = cleanup(job(tmp_path, second, "PP1TP2DP1", "every_steps: 10, keep: 2", slots=2))
    said = started.wait_for(rf"continuing from checkpoint of step {step} \((.*)\)")[1]
    assert re.fullmatch(r"\d+ steps? and \d+\.\d s of training lost", said)
    assert abs(int(said.split()[0]) - (reached + 1 - step)) <= 3
    wait_for_step(second, reached + 3)
    ask_to_end(second, 20)
    assert started.wait() == 0
    before, after = losses(first), losses(second)
    assert min(after) == step
    again = before.keys() & after.keys()
    assert again
    for each in again:
        assert abs(before[each] - after[each]) < 1e-5
    assert 1 <= len([path for path in newest_first(folder) if is_complete(path)]) <= 2


def test_a_restart_after_a_failure_goes_on_from_a_checkpoint_and_leaves_a_damaged_one_out(
    tmp_path: Path, cleanup: Cleanup
) -> None:
    folder, log = tmp_path / "saved", tmp_path / "log"
    # Nothing is written while the test damages what there is, nor between that and the failure.
    started = cleanup(
        job(tmp_path, log, "PP2TP1DP1", "every_steps: 40, keep: 3", slots=2, options=("--max-restarts", 1))
    )
    newest = wait_for_checkpoint(folder, 80)
    metadata = bytearray((newest / METADATA).read_bytes())
    metadata[len(metadata) // 2] ^= 1
    (newest / METADATA).write_bytes(metadata)
    victim = next(line["pid"] for line in steps_of(log) if line["rank"] == 1)
    os.kill(victim, signal.SIGKILL)
    started.wait_for(r"checkpoint step-80 is not complete and is left out: .*changed since it was written")
    started.wait_for(r"continuing from checkpoint of step 40 \(\d+ steps and ")
    wait_until(lambda: len({line["pid"] for line in steps_of(log)}) == 4, "new workers")
    ask_to_end(log, 20)
    assert started.wait() == 0


def test_sigterm_to_every_node_writes_a_checkpoint_of_the_last_step(tmp_path: Path, cleanup: Cleanup) -> None:
    folder, log = tmp_path / "saved", tmp_path / "log"
    started = cleanup(job(tmp_path, log, "PP1TP1DP2", "every_s: 1000, on_stop: true", slots=2))
    wait_for_step(log, 5)
    for pid in (*started.descendants(), started.process.pid):  # as a scheduler does it
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
    assert started.wait() == 143
    started.assert_nothing_left()
    (path,) = newest_first(folder)
    assert check(path).step == steps_of(log)[-1]["step"] + 1


def test_two_nodes_that_are_told_to_leave_one_after_the_other_write_one_checkpoint_together(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    folder, log = tmp_path / "saved", tmp_path / "log"
    log.mkdir()
    (tmp_path / "job.yaml").write_text("checkpoint: {folder: saved, every_s: 1000, on_stop: true}\n")
    nodes = [
        cleanup(EtcRun(
            "--nnodes", "1:2", "--nproc-per-node", 1, "--rdzv-id", "job", "--etcd-endpoints", etcd_server.endpoint,
            "--local-addr", f"127.0.0.{number}", "--config", tmp_path / "job.yaml", TINY_JOB, log, 100_000, 0.05,
            cwd=tmp_path,
        ))
        for number in (2, 3)
    ]
    wait_for_workers(log, 2)
    for started in nodes:
        started.send(signal.SIGTERM)
    codes = [started.wait() for started in nodes]
    assert 143 in codes
    assert set(codes) <= {0, 143}, "the first may have handed its state over before the second was told"
    (path,) = newest_first(folder)
    assert check(path).step == steps_of(log)[-1]["step"] + 1


@pytest.mark.long
def test_a_job_changes_size_while_checkpoints_are_written_all_the_time(tmp_path: Path, cleanup: Cleanup) -> None:
    folder, log = tmp_path / "saved", tmp_path / "log"
    started = cleanup(job(tmp_path, log, "PP1TP1DP2", "every_steps: 1"))
    etcd: Any = etcd_of(started)
    wait_for_checkpoint(folder, 3)
    for config in ("PP2TP1DP2", "PP1TP2DP1"):
        etcd.scale(config)
        etcd.reply_to(config, "done")
        # A checkpoint of the new size: that of the one before may still have been under way.
        wait_until(lambda: _config_of_newest(folder) == config, f"a checkpoint of {config}")  # noqa: B023
    last = ask_to_end(log, 10)
    assert started.wait() == 0
    assert steps_of(log)[-1]["step"] == last
    assert is_complete(newest_first(folder)[0])


def _config_of_newest(folder: Path) -> str:
    return next((check(path).config for path in newest_first(folder) if is_complete(path)), "")
