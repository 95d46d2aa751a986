"""Workers that run a function end as those that run a script do, whatever started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from etc_agent.rendezvous.private.server import EtcdServer

METHODS = ["spawn", "fork", pytest.param("forkserver", marks=pytest.mark.long)]
TIMEOUT_S = 90.0

SCRIPT = r"""
import os, signal, subprocess, sys, time
from pathlib import Path
folder, action, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
if action == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
(folder / f"{rank}.new").write_text(f"{os.getpid()} {child.pid} {os.environ['WORLD_SIZE']}")
(folder / f"{rank}.new").rename(folder / f"{rank}.pids")
while len(list(folder.glob("*.pids"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
if action == "end":
    sys.exit(0)
if action == "cut" and rank == 1:
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text('{"message": ')
    sys.exit(7)
if action == "fail" and rank == 1:
    raise ValueError("the cause")
time.sleep(600)
"""


class Job:
    """One etc-run of SCRIPT, as a process group of its own. `method`: how its function is started under ``--run-path``,
    None to run the script as such."""

    def __init__(self, folder: Path, method: str | None, action: str, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        script = folder / "script.py"
        script.write_text(SCRIPT)
        self._stderr = folder / "stderr"
        how = () if method is None else ("--run-path", "--start-method", method)
        command = [sys.executable, "-m", "launcher.run", *options, *how, str(script)]
        with self._stderr.open("w") as stderr:
            self.launcher = subprocess.Popen(
                [*command, str(folder), action], stdout=stderr, stderr=stderr, start_new_session=True
            )

    @property
    def said(self) -> str:
        return self._stderr.read_text()

    def wait_for_workers(self, num_workers: int) -> None:
        _wait_until(lambda: len(self._reports()) == num_workers, self)

    def end(self) -> int:
        return self.launcher.wait(TIMEOUT_S)

    def left(self) -> set[int]:
        """The workers, and what they have started, that run."""
        return {int(pid) for report in self._reports() for pid in report.split()[:2] if _runs(int(pid))}

    def _reports(self) -> list[str]:
        return [path.read_text() for path in self.folder.glob("*.pids")]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_until(is_so: Callable[[], bool], job: Job) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline, job.said
        time.sleep(0.05)


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Jobs of a test, all ended after it."""
    started: list[Job] = []
    yield started
    for job in started:
        if job.launcher.poll() is None:
            job.launcher.kill()
            job.launcher.wait()
        for pid in job.left():
            os.kill(pid, signal.SIGKILL)


def alone(tmp_path: Path, jobs: list[Job], method: str | None, action: str, *options: str) -> Job:
    jobs.append(Job(tmp_path, method, action, "--standalone", "--nproc-per-node=2", *options))
    return jobs[-1]


@pytest.mark.parametrize("method", METHODS)
def test_the_failure_of_one_ends_all_and_what_they_have_started(tmp_path: Path, jobs: list[Job], method: str) -> None:
    job = alone(tmp_path, jobs, method, "fail")
    assert job.end() == 1
    assert "ValueError: the cause" in job.said
    _wait_until(lambda: not job.left(), job)


@pytest.mark.parametrize("method", METHODS)
def test_sigterm_ends_all(tmp_path: Path, jobs: list[Job], method: str) -> None:
    job = alone(tmp_path, jobs, method, "wait")
    job.wait_for_workers(2)
    job.launcher.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    assert job.end() == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 20, "before the 30 s after which SIGKILL comes"
    assert not job.left()


@pytest.mark.parametrize("runs", ["function", "script"])
def test_an_error_file_that_was_cut_short_does_not_end_the_agent(tmp_path: Path, jobs: list[Job], runs: str) -> None:
    options = (f"--log-dir={tmp_path / 'logs'}",)
    job = alone(tmp_path, jobs, "fork" if runs == "function" else None, "cut", *options)
    assert job.end() == 7
    assert "Traceback" not in job.said
    assert len(list((tmp_path / "logs").rglob("error.json.unreadable"))) == 1


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path, jobs: list[Job]) -> None:
    job = alone(tmp_path, jobs, "fork", "deaf", "--shutdown-timeout=1")
    job.wait_for_workers(2)
    job.launcher.send_signal(signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM
    assert not job.left()


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_agent_takes_all_with_it(tmp_path: Path, jobs: list[Job], method: str) -> None:
    job = alone(tmp_path, jobs, method, "wait")
    job.wait_for_workers(2)
    job.launcher.kill()
    _wait_until(lambda: not job.left(), job)


def test_two_nodes_run_one_job(tmp_path: Path, jobs: list[Job]) -> None:
    folder = tmp_path / "both"
    with EtcdServer() as etcd:
        options = [f"--etcd-endpoints={etcd.endpoint}", "--rdzv-id=functions", "--nnodes=2", "--nproc-per-node=1"]
        for address in ("127.0.0.1", "127.0.0.2"):
            jobs.append(Job(folder, "spawn", "end", *options, f"--local-addr={address}"))
        assert [job.end() for job in jobs] == [0, 0], jobs[0].said
    assert sorted(path.name for path in folder.glob("*.pids")) == ["0.pids", "1.pids"]
