"""Processes that run a function: how they are started, what they bring back, and that none outlives its end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig

from etc_agent.agent.processes.functions import worker_program
from etc_agent.agent.processes.logs import WorkerLogs
from etc_agent.agent.safety.guardian import Guardian
from etc_agent.agent.settings import JobSettings
from etc_agent.control.channel import SOCKET_VARIABLE
from etc_agent.errors import EtcError

METHODS = ["spawn", "fork", "forkserver"]
TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def _own_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchelastic puts handlers of its own in place when it starts a process; so `keep_handlers` keeps them away."""
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGRTMAX")


class Node:
    """Starts processes as an agent does that runs `function` with `args`."""

    def __init__(self, stack: ExitStack, folder: Path, method: str, function: Callable[..., Any], *args: Any) -> None:
        self._folder, self._stack = folder, stack
        config = LaunchConfig(1, 1, 1, run_id="x", start_method=method)
        settings = JobSettings(function, args, config, "x", 1, 1, 1)
        self._program = stack.enter_context(worker_program(settings))

    def start(self, slot: int = 0, logs: WorkerLogs | None = None) -> Any:
        environment = {"RANK": str(slot), SOCKET_VARIABLE: str(self._folder / "socket")}
        logs = logs or WorkerLogs(DefaultLogsSpecs(), slot, None)
        context = self._program.start(slot, environment, logs)
        self._stack.callback(kill, context)
        return context


def kill(context: Any) -> None:
    """Nothing outlives a test, however it ends."""
    if context.wait(timeout=0) is None:
        os.kill(context.pids()[0], signal.SIGKILL)


def ended(context: Any) -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    while (result := context.wait(timeout=0)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return result


def describe(word: str, data: bytes) -> tuple[str, bool, bytes]:
    return f"{word} {os.environ['RANK']}", os.getpgid(0) == os.getsid(0) == os.getpid(), data


def wait_for(file: Path) -> str:
    Path(f"{file}.begun").touch()
    while not file.exists():
        time.sleep(0.01)
    return "done"


def wait_for_ever() -> None:
    time.sleep(600)


@pytest.mark.parametrize("method", METHODS)
def test_each_leads_a_group_and_returns_what_the_function_does(tmp_path: Path, method: str) -> None:
    large = bytes(1 << 20)
    with ExitStack() as stack:
        node = Node(stack, tmp_path, method, describe, "slot ${local_rank}", large)
        contexts = [node.start(slot) for slot in range(2)]
        returned = [ended(context).return_values[0] for context in contexts]
    assert returned == [("slot 0 0", True, large), ("slot 1 1", True, large)]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", METHODS)
def test_one_that_has_just_been_started_can_be_killed(tmp_path: Path, method: str) -> None:
    """A spawned process takes seconds until it leads its group."""
    with ExitStack() as stack:
        node = Node(stack, tmp_path, method, wait_for_ever)
        guardian = Guardian()
        context = node.start()
        guardian.watch_group(context.pids()[0])
        guardian.close()  # as when the agent dies
        assert ended(context).failures[0].exitcode == -signal.SIGKILL


def test_a_forked_one_finds_the_memory_of_the_program_and_its_signal_handlers(tmp_path: Path) -> None:
    kept, handlers = object(), {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def look(given: object) -> bool:
        return given is kept and all(signal.getsignal(number) is handlers[number] for number in handlers)

    with ExitStack() as stack:
        node = Node(stack, tmp_path, "fork", look, kept)
        for number in handlers:  # as the agent does, later
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        assert ended(node.start()).return_values[0] is True


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_returned_value_that_cannot_be_read_here_is_none(tmp_path: Path) -> None:
    with ExitStack() as stack:
        assert ended(Node(stack, tmp_path, "fork", Unreadable).start()).return_values[0] is None


def test_forked_ones_end_with_the_server_that_they_come_from(tmp_path: Path) -> None:
    with ExitStack() as stack:
        node = Node(stack, tmp_path, "fork", wait_for_ever)
        context = node.start()
        os.kill(parent_of(context), signal.SIGKILL)
        assert ended(context).failures[0].exitcode == -signal.SIGKILL
        with pytest.raises(EtcError, match="was killed"):
            node.start()


def parent_of(context: Any) -> int:
    return int(Path(f"/proc/{context.pids()[0]}/stat").read_text().rpartition(")")[2].split()[1])


def test_one_goes_on_where_a_signal_to_all_has_ended_multiprocessings_server(tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    with ExitStack() as stack:
        context = Node(stack, tmp_path, "forkserver", wait_for, go_on).start()
        deadline = time.monotonic() + TIMEOUT_S
        while not Path(f"{go_on}.begun").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server = parent_of(context)
        os.kill(server, signal.SIGKILL)
        while parent_of(context) == server:
            time.sleep(0.01)
        assert context.wait(timeout=0) is None
        go_on.touch()
        assert ended(context).return_values[0] == "done"


def test_what_cannot_be_sent_to_another_process_is_refused_in_one_line(tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(EtcError, match="define the function at the top of a module, or choose"):
        Node(stack, tmp_path, "spawn", lambda: None).start()


def test_output_goes_to_the_files_that_were_asked_for(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with ExitStack() as stack:
        node = Node(stack, tmp_path, "fork", lambda: subprocess.run(["echo", "heard"], check=True) and None)
        logs = WorkerLogs(DefaultLogsSpecs(redirects=DefaultLogsSpecs()._redirects.from_str("3")), 0, tmp_path / "logs")
        ended(node.start(0, logs))
    assert (tmp_path / "logs" / "stdout.log").read_text() == "heard\n"
