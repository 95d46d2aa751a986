"""etc-ctl with a real job: what it says beforehand, and what then happens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.ctl.conftest import Ended, ctl_bare
from tests.scenarios.running import (
    TINY_JOB,
    Etcd,
    EtcRun,
    etcd_of,
    standalone,
    steps_of,
    wait_for_step,
    wait_for_workers,
    wait_until,
)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[EtcRun, Etcd]]:
    run = standalone(
        tmp_path, TINY_JOB, tmp_path, 100_000, 0.02, "{}", slots=2,
        options=("--parallel", "DP1", "--redirects", "3", "--log-dir", tmp_path / "logs"),
    )
    try:
        wait_for_step(tmp_path, 2)
        yield run, etcd_of(run)
    finally:
        run.kill()


def test_a_running_job_is_looked_at_previewed_changed_and_stopped(
    job: tuple[EtcRun, Etcd], tmp_path: Path
) -> None:
    run, etcd = job

    def ctl(*arguments: str) -> Ended:
        return ctl_bare(*arguments, "--etcd-endpoints", etcd.endpoint, "--run-id", "job")

    assert ctl("wait", "--for", "state=running", "--timeout", "60").code == 0
    planned = ctl("scale", "2", "--dry-run", "-o", "json").json
    assert planned["result"] == "accepted"
    assert ctl("status", "-o", "json").json["workers"] == 1, "a dry run changes nothing"
    assert ctl("scale", "2", "--wait").code == 0
    wait_for_workers(tmp_path, 2)
    (change,) = ctl("history", "--last", "1", "-o", "json").lines
    assert change["moved_bytes"] == planned["plan"]["moved_bytes"]
    assert ctl("wait", "--for", f"config={planned['config']}", "--timeout", "60").code == 0
    status = ctl("status", "-o", "json").json
    (node,) = status["nodes"]
    assert node["ranks"] == [0, 1]
    assert status["survives"]["worker"] is True
    (look,) = ctl("top", "--once", "-o", "json").lines
    assert look["nodes"][0]["step"] > 0
    logged = ctl("logs", f"{node['name']}/1", "-o", "json").lines
    assert {Path(each["file"]).parent.name for each in logged} == {"1"}
    os.kill(next(line["pid"] for line in reversed(steps_of(tmp_path)) if line["rank"] == 1), signal.SIGKILL)
    (loss,) = wait_until(lambda: ctl("history", "--grep", "SIGKILL", "-o", "json").lines, "the loss in the history")
    assert (loss["trigger"], loss["previous"] > 0, loss["kept"]) == ("worker_killed", True, 1)
    assert ctl("status", "-o", "json").json["losses"] == 1
    assert ctl("report", "-o", str(tmp_path / "r.html"), "--output", "json").json["failures"] == 1
    assert "handled in place: 1 workers kept" in (tmp_path / "r.html").read_text()
    assert ctl("stop", "--why", "seen enough", "--wait").code == 0
    assert run.wait() == 143
    assert "an administrator stopped it: seen enough" in run.output
