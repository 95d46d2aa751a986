"""`launcher.elastic_launch` and `launcher.run`: elastic jobs from Python, as torch's own modules start theirs."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed.launcher.api
import torch.distributed.run
from torch.distributed.launcher.api import LaunchConfig

import launcher
import launcher.api
import launcher.run
from etc_agent.errors import EtcError
from etc_agent.parallel.config import ParallelConfig
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.private.server import EtcdServer

PROGRAM = r"""
import os, sys, time
from functools import partial
from pathlib import Path
from threading import Thread
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from launcher import JobFailed, JobStopped, LaunchConfig, elastic_launch

def work(folder, how):
    rank = os.environ["RANK"]
    Path(folder, f"{rank}.here").touch()
    while not all(Path(folder, f"{each}.here").exists() for each in "01"):  # the first to fail ends both
        time.sleep(0.01)
    if how == "raise" and rank == "1":
        raise ValueError("the cause")
    if how == "raise" or how == "wait":
        time.sleep(600)
    if how == "exit":
        sys.exit(5)
    return f"{rank} of {os.environ['WORLD_SIZE']}"

@record
def main(endpoint, folder, how):
    config = LaunchConfig(1, 1, 2, run_id=how, rdzv_backend="etcd-v3", rdzv_endpoint=endpoint, max_restarts=0,
                          local_addr="127.0.0.1", logs_specs=DefaultLogsSpecs(log_dir=folder))
    try:
        print("returned", elastic_launch(config, partial(work))(folder, "end" if how == "thread" else how))
    except JobFailed as failed:
        assert isinstance(failed, ChildFailedError)
        for rank, failure in failed.failures.items():
            print("failed", failed.exit_code, rank, failure.local_rank, failure.exitcode, failure.pid > 0)
        if how == "raise":
            raise
    except JobStopped as stopped:
        assert isinstance(stopped, SignalException)
        print("stopped", stopped.exit_code, stopped.sigval.name)

if __name__ == "__main__":
    if sys.argv[3] == "thread":
        thread = Thread(target=main, args=sys.argv[1:])
        thread.start()
        thread.join()
    else:
        main(*sys.argv[1:])
"""


class Ended(NamedTuple):
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with EtcdServer() as etcd:
        yield etcd.endpoint


def start(endpoint: str, folder: Path, how: str) -> subprocess.Popen[str]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), endpoint, str(folder), how]
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(endpoint: str, folder: Path, how: str) -> Ended:
    with start(endpoint, folder, how) as program:
        return Ended(*program.communicate(timeout=120))


@pytest.mark.parametrize("how", ["end", "thread"])
def test_a_job_returns_what_the_function_of_each_rank_has(endpoint: str, tmp_path: Path, how: str) -> None:
    ended = run(endpoint, tmp_path, how)
    assert ended.stdout == "returned {0: '0 of 2', 1: '1 of 2'}\n", ended.stderr


def test_a_job_that_fails_raises_torchs_error_with_the_failures_by_rank(endpoint: str, tmp_path: Path) -> None:
    ended = run(endpoint, tmp_path, "exit")
    lines = ended.stdout.splitlines()
    assert lines, ended.stderr
    assert {line[:13] for line in lines} <= {"failed 5 0 0 ", "failed 5 1 1 "}
    assert all(line.endswith(" 5 True") for line in lines)


def test_record_keeps_the_cause_that_a_worker_has_recorded(endpoint: str, tmp_path: Path) -> None:
    ended = run(endpoint, tmp_path, "raise")
    assert ended.stdout == "failed 1 1 1 1 True\n", ended.stderr
    assert "JobFailed: the job failed with exit code 1" in ended.stderr
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "ValueError: the cause"


def test_a_job_that_a_signal_stops_raises_torchs_error_with_that_signal(endpoint: str, tmp_path: Path) -> None:
    with start(endpoint, tmp_path, "wait") as program:
        deadline = time.monotonic() + 90
        while len(list(tmp_path.glob("*.here"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        program.send_signal(signal.SIGTERM)
        stdout, stderr = program.communicate(timeout=90)
    assert stdout == "stopped 143 SIGTERM\n", stderr


def test_other_backends_go_to_torch() -> None:
    config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    assert launcher.elastic_launch(config, "/bin/true")() == {0: None, 1: None}


def test_a_function_that_cannot_be_sent_is_refused_before_the_job_is_in_etcd(endpoint: str) -> None:
    config = LaunchConfig(1, 1, 2, run_id="unsendable", rdzv_backend="etcd-v3", rdzv_endpoint=endpoint)
    with pytest.raises(EtcError, match=r"started by spawn.*lambda.*top of a module"):
        launcher.elastic_launch(config, lambda: None)()
    with EtcdClient((endpoint,)) as client:
        assert client.get_prefix(JobKeys("unsendable").root)[0] == []


def test_a_config_that_can_never_be_is_refused_in_one_line() -> None:
    config = LaunchConfig(1, 1, 2, run_id="x", rdzv_backend="etcd-v3", rdzv_endpoint="a:1")
    with pytest.raises(EtcError, match="PP4TP1DP1 needs 4 workers, the job admits 2"):
        launcher.elastic_launch(config, "true", parallel=ParallelConfig(pp=4))


def public(module: Any) -> set[str]:
    """The functions and classes that a module defines for others."""
    return {
        name for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__ and callable(value)
    }


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [(launcher.run, torch.distributed.run), (launcher.api, torch.distributed.launcher.api)],
)
def test_what_torchs_modules_offer_is_offered_here(ours: Any, torchs: Any) -> None:
    missing = {name for name in public(torchs) if not callable(getattr(ours, name, None))}
    assert not missing
    for name in public(torchs) - {"main"}:
        theirs = inspect.signature(getattr(torchs, name)).parameters
        assert [*inspect.signature(getattr(ours, name)).parameters][: len(theirs)] == [*theirs], name


def test_arguments_run_as_they_do_from_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; sys.exit(3 if os.environ.get('ETC_CONTROL_SOCKET') else 4)\n")
    program = (
        "import launcher.run, torch.distributed.run as torchrun, launcher\n"
        f"words = ['--standalone', '--nproc-per-node=2', {str(script)!r}]\n"
        "for parse in (launcher.run.parse_args, torchrun.parse_args):\n"
        "    try:\n"
        "        launcher.run.run(parse(words))\n"
        "    except launcher.JobFailed as failed:\n"
        "        print(failed.exit_code)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout == "3\n3\n", ended.stderr


def test_arguments_count_as_typed_where_they_are_not_the_default() -> None:
    from launcher.options import command_line_of

    line = command_line_of(launcher.run.parse_args(["--standalone", "--max-restarts=2", "train.py", "--x"]))
    assert set(line.typed) == {"standalone", "max_restarts", "training_script", "training_script_args"}
    assert line.args.training_script_args == ["--x"]
    assert isinstance(line.args, argparse.Namespace)
