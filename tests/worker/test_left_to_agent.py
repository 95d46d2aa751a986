"""Signals that tell a node to leave, in a worker with an open session and in its children: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPEAT_S = 1.0


class Signalled:
    """`signalled.py`, in a process group of its own, and what it says."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker.signalled", *arguments], cwd=ROOT, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.lines: list[str] = []

    def until(self, line: str) -> list[str]:
        """Everything up to this line, which comes."""
        assert self.process.stdout is not None
        while line not in self.lines:
            said = self.process.stdout.readline()
            assert said, f"it ended with {self.process.wait()} before it said {line!r}: {self.lines}"
            self.lines.append(said.strip())
        return self.lines

    def signal_all(self, number: signal.Signals = signal.SIGTERM) -> None:
        os.killpg(self.process.pid, number)

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, list[str]]:
        """Its exit code, and everything that it has said."""
        rest, _ = self.process.communicate(timeout=60)
        self.lines += rest.splitlines()
        return self.process.returncode, self.lines


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[Signalled]:
    process = Signalled(*request.param)
    yield process
    if process.process.poll() is None:
        process.signal_all(signal.SIGKILL)
    process.end()


REPORTED = "reported Signalled(number=15)"


@pytest.mark.parametrize("run", [("children", "fork"), ("children", "spawn")], ids=" ".join, indirect=True)
def test_a_signal_to_all_is_reported_once_and_loaders_and_forked_children_go_on(run: Signalled) -> None:
    lines = run.until("ready")
    assert [line.split()[0] for line in lines].count("loader") >= 2
    run.signal_all()
    run.signal_all()  # a scheduler may repeat itself
    run.until(REPORTED)
    time.sleep(0.6)  # longer than a child waits for its parent's signal
    run.go_on()
    exit_code, lines = run.end()
    assert "batches 998" in lines
    assert "the child has gone on" in lines
    assert "exit code of the child 0" in lines
    assert lines.count(REPORTED) == 1
    assert exit_code == 0


@pytest.mark.parametrize("run", [("stuck",)], ids=" ".join, indirect=True)
def test_a_main_thread_in_a_collective_is_no_hindrance_and_a_second_signal_ends_the_worker(run: Signalled) -> None:
    run.until("ready")
    run.signal_all()
    run.until(REPORTED)
    assert run.process.poll() is None
    time.sleep(REPEAT_S)  # until a signal is no repetition any more
    run.signal_all()
    exit_code, lines = run.end()
    assert exit_code == -signal.SIGTERM
    assert "has waited" not in lines


@pytest.mark.parametrize("run", [("own",)], ids=" ".join, indirect=True)
def test_a_handler_of_the_script_s_own_is_left_alone(run: Signalled) -> None:
    run.until("ready")
    run.signal_all()
    run.until("the script's own handler")
    run.go_on()
    exit_code, lines = run.end()
    assert (exit_code, REPORTED in lines) == (0, False)


@pytest.mark.parametrize("run", [("after",)], ids=" ".join, indirect=True)
def test_after_the_session_a_signal_does_what_it_did_before(run: Signalled) -> None:
    run.until("ready")
    run.signal_all()
    assert run.end()[0] == -signal.SIGTERM


@pytest.mark.parametrize("run", [("terminate",)], ids=" ".join, indirect=True)
def test_a_child_that_alone_gets_the_signal_ends_by_it(run: Signalled) -> None:
    exit_code, lines = run.end()
    assert f"exit code of the child {-signal.SIGTERM}" in lines
    assert exit_code == 0
