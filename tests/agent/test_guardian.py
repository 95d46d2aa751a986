"""The guardian kills what its agent started: when the agent is gone, and when the time that it was told passes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import has_ended, process_group, wait_until

from etc_agent.agent.safety.guardian import Guardian

AGENT = """
import subprocess, sys, time
from pathlib import Path
from etc_agent.agent.safety.guardian import Guardian
guardian = Guardian()
worker = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], start_new_session=True, stdout=subprocess.PIPE)
guardian.watch_group(worker.pid)
guardian.remove_folder(Path(sys.argv[1]))
guardian.allow_until(time.monotonic() + float(sys.argv[2]))
print(worker.pid, worker.stdout.readline().decode().strip(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def guardian() -> Iterator[Guardian]:
    guardian = Guardian()
    yield guardian
    guardian.close()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_agent_that_is_killed_takes_its_workers_their_children_and_its_folder_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "socket").touch()
    command = [sys.executable, "-c", AGENT, str(folder), "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        pids = [int(pid) for pid in agent.stdout.readline().split()]
        assert all(map(is_running, pids))
        agent.kill()
        wait_until(lambda: not any(map(is_running, pids)), "the end of the worker and its child")
        wait_until(lambda: not folder.exists(), "the removal of the folder")


def test_a_stopped_agent_loses_its_workers_when_their_time_is_over(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AGENT, str(tmp_path / "none"), "1.0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        pids = [int(pid) for pid in agent.stdout.readline().split()]
        os.kill(agent.pid, signal.SIGSTOP)
        wait_until(lambda: not any(map(is_running, pids)), "the end of the worker and its child")
        agent.kill()


def test_workers_live_until_the_last_time_that_was_told(guardian: Guardian) -> None:
    with process_group() as worker:
        guardian.watch_group(worker.pid)
        told = time.monotonic()
        guardian.allow_until(told + 60)
        guardian.allow_until(told + 0.5)
        wait_until(lambda: has_ended(worker), "the end of the worker")
        assert 0.5 <= time.monotonic() - told < 30


def test_a_time_that_is_put_off_again_and_again_ends_nothing(guardian: Guardian) -> None:
    with process_group() as worker:
        guardian.watch_group(worker.pid)
        begin = time.monotonic()
        while time.monotonic() < begin + 1.0:
            guardian.allow_until(time.monotonic() + 0.7)
            time.sleep(0.02)
        assert not has_ended(worker)


def test_a_group_that_was_forgotten_is_left_alone(guardian: Guardian) -> None:
    with process_group() as kept, process_group() as other:
        for group in (kept.pid, other.pid):
            guardian.watch_group(group)
        guardian.forget_group(kept.pid)
        guardian.allow_until(0.0)
        wait_until(lambda: has_ended(other), "the end of the group that is still watched")
        assert not has_ended(kept)
