"""The end of a process wakes the agent at once, and everything that the process had sent is read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig
from waiting import process_group, wait_until

from etc_agent.agent.control_server import ControlServer
from etc_agent.agent.inbox import Inbox, Said
from etc_agent.agent.processes.deaths import DeathWatch
from etc_agent.agent.processes.functions import worker_program
from etc_agent.agent.processes.local_workers import LocalWorkers
from etc_agent.agent.processes.logs import WorkerLogs
from etc_agent.agent.processes.programs import Script
from etc_agent.agent.processes.torch_events import TorchEvents
from etc_agent.agent.processes.worker_process import WorkerProcess
from etc_agent.agent.safety.guardian import Guardian
from etc_agent.agent.settings import JobSettings
from etc_agent.control.channel import SOCKET_VARIABLE

PROMPTLY_S = 1.0
"""What a busy machine may take for something that happens at once."""


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def deaths(inbox: Inbox) -> Iterator[DeathWatch]:
    deaths = DeathWatch(inbox.changed)
    yield deaths
    deaths.close()


def sleep_for_ever() -> None:
    time.sleep(600)


def seconds_until(inbox: Inbox, condition: Callable[[], object]) -> float:
    """How long it takes until `condition` holds, which is looked at only when the inbox has something."""
    begin = time.monotonic()
    while not condition():
        assert inbox.take(20.0), "nothing has come"
    return time.monotonic() - begin


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_the_end_of_a_process_that_runs_a_function_wakes_whoever_waits_until_its_exit_code_is_known(
    inbox: Inbox, deaths: DeathWatch, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGRTMAX")
    config = LaunchConfig(1, 1, 1, run_id="x", start_method=method)
    with ExitStack() as stack:
        program = stack.enter_context(worker_program(JobSettings(sleep_for_ever, (), config, "x", 1, 1, 1)))
        environment = {"RANK": "0", SOCKET_VARIABLE: str(tmp_path / "socket")}
        context: Any = program.start(0, environment, WorkerLogs(DefaultLogsSpecs(), 0, None))
        (pid,) = context.pids().values()
        deaths.watch(pid)
        assert inbox.take(0.05) == []
        os.kill(pid, signal.SIGKILL)
        assert seconds_until(inbox, lambda: context.wait(timeout=0)) < PROMPTLY_S
        deaths.forget(pid)


def test_nothing_wakes_anybody_any_more_once_the_end_is_known(inbox: Inbox, deaths: DeathWatch) -> None:
    with process_group() as first, process_group() as second:
        deaths.watch(first.pid)
        deaths.watch(second.pid)
        first.kill()
        assert inbox.take(20.0)
        first.wait()
        deaths.forget(first.pid)
        inbox.take(0.2)
        assert inbox.take(0.3) == []
        second.kill()
        assert inbox.take(20.0)
        deaths.forget(second.pid)


def test_a_process_that_had_ended_before_it_was_watched_wakes_too(inbox: Inbox, deaths: DeathWatch) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    deaths.watch(process.pid)
    assert inbox.take(20.0)


WORKER = """
import os, subprocess, time
from etc_agent.control.channel import Channel
from etc_agent.control.messages import Hello, Raised
from etc_agent.control.causes import ErrorKind
channel = Channel.connect({socket!r})
channel.send(Hello(0, os.getpid(), 1))
channel.send(Raised("ValueError: its last words", ErrorKind.RAISED))
os.set_inheritable(channel._socket.fileno(), True)
child = subprocess.Popen(["sleep", "600"], start_new_session=True, close_fds=False)
open({ready!r}, "w").write(str(child.pid))
time.sleep(600)
"""


def test_a_child_that_holds_the_connection_of_a_dead_worker_open_delays_nothing(
    inbox: Inbox, deaths: DeathWatch, tmp_path: Path
) -> None:
    server, guardian = ControlServer(tmp_path, inbox.said), Guardian()
    workers = LocalWorkers("node", guardian, deaths)
    config, ready = LaunchConfig(1, 1, 1), tmp_path / "ready"
    program = Script(config, sys.executable, ("-c", WORKER.format(socket=str(server.path), ready=str(ready))))
    logs = WorkerLogs(DefaultLogsSpecs(), 0, None)
    process = WorkerProcess.start(program, config, 0, {}, logs, cast(TorchEvents, None))
    workers.add(0, 1, process)

    def failure() -> object:
        workers.poll()
        return workers.views()[0].failure

    def look() -> object:
        for item in inbox.take(0.0):
            if isinstance(item, Said):
                workers.receive(item.hello, item.channel, item.message)
        return failure()

    try:
        wait_until(lambda: ready.exists() and ready.read_text(), "the worker")
        wait_until(lambda: look() or workers.all()[0].channel is not None, "the worker's Hello")
        process.send_signal(signal.SIGKILL)
        begin = time.monotonic()
        wait_until(look, "its failure")
        assert time.monotonic() - begin < PROMPTLY_S
        assert "its last words" in str(workers.views()[0].failure)
    finally:
        process.kill_group()
        os.kill(int(ready.read_text()), signal.SIGKILL)
        server.close()
        guardian.close()
