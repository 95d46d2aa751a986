"""Signals to an agent, and to everything that it has started: real processes, no root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig

from etc_agent.agent.leaving import REPEAT_S, Leaving, SignalMeaning
from etc_agent.agent.processes.deaths import DeathWatch
from etc_agent.agent.processes.local_workers import LocalWorkers
from etc_agent.agent.processes.logs import WorkerLogs
from etc_agent.agent.processes.programs import Script
from etc_agent.agent.processes.torch_events import TorchEvents
from etc_agent.agent.processes.worker_process import WorkerProcess
from etc_agent.agent.safety.guardian import Guardian
from etc_agent.agent.safety.signals import catches, deliver, heeded, interrupting, keep_handlers
from etc_agent.control.channel import Channel
from etc_agent.control.messages import Hello, Signalled
from etc_agent.reconfig.known.records import FailureKind

ROOT = Path(__file__).resolve().parents[2]
TAKEN = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain for {what}"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in TAKEN}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# ---- what a signal means -------------------------------------------------------------------------------------------


def test_the_first_signal_is_a_leave_one_right_after_it_the_same_and_a_later_one_a_stop() -> None:
    leaving = Leaving()
    assert leaving.take_signal(signal.SIGTERM, now=100.0) is SignalMeaning.LEAVE
    assert leaving.is_told
    assert leaving.take_signal(signal.SIGTERM, now=100.0 + REPEAT_S / 2) is SignalMeaning.REPEATED
    assert leaving.signals == [signal.SIGTERM]
    assert leaving.take_signal(signal.SIGINT, now=100.0 + 2 * REPEAT_S) is SignalMeaning.STOP
    assert leaving.signals == [signal.SIGTERM, signal.SIGINT]


def test_the_signal_after_the_probe_s_notice_is_the_first_and_no_deadline_moves_away() -> None:
    leaving = Leaving(is_preempted=True)
    leaving.be_gone_by(now=0.0, limit_s=30.0)
    assert leaving.take_signal(signal.SIGTERM, now=10.0) is SignalMeaning.LEAVE
    leaving.be_gone_by(now=10.0, limit_s=300.0)
    assert leaving.deadline == 30.0


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL], ids=["nohup", "a terminal"])
def test_a_sighup_that_is_ignored_from_the_start_stays_ignored(handler: signal.Handlers) -> None:
    signal.signal(signal.SIGHUP, handler)
    heard: list[int] = []
    with interrupting(heeded(TAKEN)):
        deliver(heeded(TAKEN), heard.append)
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
    expected = [signal.SIGTERM] if handler is signal.SIG_IGN else [signal.SIGHUP, signal.SIGTERM]
    assert heard == expected
    assert signal.getsignal(signal.SIGHUP) is handler


def test_in_a_thread_no_handler_is_set_and_nothing_fails() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(heeded(TAKEN)))
    thread.start()
    thread.join()
    assert found == [()]


# ---- workers that are signalled too --------------------------------------------------------------------------------


@pytest.fixture
def workers() -> Iterator[LocalWorkers]:
    keep_handlers()
    guardian, deaths = Guardian(), DeathWatch(lambda: None)
    found = LocalWorkers("node", guardian, deaths, TAKEN)
    yield found
    found.stop_all(0.0)
    wait_until(lambda: found.poll() or not found.are_running, "the workers' end")
    deaths.close()
    guardian.close()


def start(workers: LocalWorkers, code: str, ready: Path, index: int = 0) -> WorkerProcess:
    """A worker that has run `code` and now waits."""
    text = f"import pathlib, signal, time\n{code}\npathlib.Path({str(ready)!r}).touch()\ntime.sleep(600)"
    logs = WorkerLogs(DefaultLogsSpecs(), index, None)
    config = LaunchConfig(1, 1, 1)
    program = Script(config, sys.executable, ("-c", text))
    process = WorkerProcess.start(program, config, index, {}, logs, cast(TorchEvents, None))
    workers.add(index, 1, process)
    wait_until(ready.exists, "the worker's start")
    return process


def until_gone(workers: LocalWorkers, process: WorkerProcess) -> None:
    wait_until(lambda: workers.poll() or process.exit_code is not None, "the worker's end")


@pytest.mark.parametrize("agent_first", [True, False])
def test_a_worker_that_dies_of_the_signal_to_its_node_is_lost_and_no_failure(
    workers: LocalWorkers, tmp_path: Path, agent_first: bool
) -> None:
    process = start(workers, "", tmp_path / "ready")
    workers.heed_signals(is_leaving=agent_first)
    process.send_signal(signal.SIGTERM)
    until_gone(workers, process)
    if not agent_first:
        assert not workers.heed_signals(is_leaving=False)
        assert workers.views()[0].exit_code is None, "the agent's own signal may be on its way"
    assert workers.heed_signals(is_leaving=True)
    assert not workers.heed_signals(is_leaving=True)
    view = workers.views()[0]
    assert (view.exit_code, view.failure) == (143, None)


def test_a_worker_that_dies_of_a_signal_to_it_alone_has_failed(workers: LocalWorkers, tmp_path: Path) -> None:
    process = start(workers, "", tmp_path / "ready")
    process.send_signal(signal.SIGTERM)
    until_gone(workers, process)
    wait_until(lambda: workers.heed_signals(is_leaving=False) or workers.views()[0].failure, "its failure")
    failure = workers.views()[0].failure
    assert failure is not None
    assert (failure.kind, failure.exit_code) == (FailureKind.KILLED, 143)


COUNTING = "signal.signal(signal.SIGTERM, lambda *_: open({0!r}, 'a').write('x'))"


@pytest.mark.parametrize("case", ["the node leaves", "the agent stops it", "nobody else was signalled"])
def test_what_a_session_leaves_to_the_agent_ends_the_worker_unless_the_node_leaves(
    workers: LocalWorkers, tmp_path: Path, case: str
) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    process = start(workers, COUNTING.format(str(taken)), tmp_path / "ready")
    if case == "the agent stops it":
        workers.stop_all(60.0)
        wait_until(lambda: taken.read_text() == "x", "the agent's signal")
    workers.receive(Hello(0, process.pid, 1), cast(Channel, None), Signalled(signal.SIGTERM))
    if case == "the agent stops it":
        assert not workers.heed_signals(is_leaving=True)
        until_gone(workers, process)
        assert workers.views()[0].failure is None
    elif case == "nobody else was signalled":
        wait_until(lambda: workers.heed_signals(is_leaving=False) or taken.read_text() == "x", "the signal")
    else:
        start(workers, COUNTING.format(str(taken)), tmp_path / "another", index=1)
        workers.receive(Hello(1, process.pid, 1), cast(Channel, None), Signalled(signal.SIGTERM))
        deadline = time.monotonic() + 2.5  # longer than another worker's signal is left alone: nothing may happen
        while time.monotonic() < deadline:
            assert not workers.heed_signals(is_leaving=True)
            time.sleep(0.05)
        assert taken.read_text() == ""


def test_a_forwarded_signal_reaches_workers_with_a_handler_and_ends_none(
    workers: LocalWorkers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "taken"
    handler = f"signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path({str(taken)!r}).touch())"
    with_handler = start(workers, handler, tmp_path / "a", 0)
    without = start(workers, "", tmp_path / "b", 1)
    assert catches(with_handler.pid, signal.SIGUSR1)
    assert not catches(without.pid, signal.SIGUSR1)
    workers.send_signal(signal.SIGUSR1)
    wait_until(taken.exists, "the handler's call")
    workers.poll()
    assert (with_handler.exit_code, without.exit_code) == (None, None)
    assert "SIGUSR1 is not forwarded to worker node/1: it has no handler" in caplog.text


# ---- a container's first process -----------------------------------------------------------------------------------

AS_FIRST = """
import os, pathlib, signal, sys, time
from etc_agent.agent.safety.first_process import beside_first_process

def zombies():
    states = {}
    for file in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            states[int(file.parent.name)] = file.read_text().rpartition(")")[2].split()[0]
        except OSError:
            pass
    return [pid for pid, state in states.items() if state == "Z"]

def main():
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(os.write(1, b"got SIGUSR1\\n")))
    for _ in range(5):
        middle = os.fork()
        if middle == 0:
            if os.fork() == 0:
                os._exit(0)
            os._exit(0)
        assert os.waitpid(middle, 0) == (middle, 0), "our own children are ours to wait for"
    deadline = time.monotonic() + 10
    while zombies() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(1, signal.SIGUSR1)
    while not heard and time.monotonic() < deadline:
        time.sleep(0.01)
    print("parent", os.getppid(), "zombies", zombies(), flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return 7

sys.exit(beside_first_process(main))
"""


def namespace() -> list[str]:
    """A command that runs its arguments as PID 1 of a namespace."""
    for flags in ("-pf", "-Urpf"):
        words = ["unshare", flags, "--mount-proc", "--kill-child"]
        if subprocess.run([*words, "true"], capture_output=True).returncode == 0:
            return words
    pytest.skip("no PID namespaces here: neither as root nor in a user namespace")


def test_etc_run_itself_leaves_no_zombies_as_pid_1(tmp_path: Path) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(
        "import os, pathlib, time\n"
        "middle = os.fork()\n"
        "if middle == 0:\n"
        "    orphan = os.fork()\n"
        "    if orphan == 0: os.setsid(); time.sleep(0.1); os._exit(0)\n"
        "    pathlib.Path('orphan').write_text(str(orphan)); os._exit(0)\n"
        "os.waitpid(middle, 0)\n"
        "orphan = pathlib.Path('/proc', pathlib.Path('orphan').read_text())\n"
        "deadline = time.monotonic() + 20\n"
        "while orphan.exists() and time.monotonic() < deadline: time.sleep(0.01)\n"
        "raise SystemExit(5 if orphan.exists() else 3)\n"
    )
    run = subprocess.run(
        [*namespace(), sys.executable, "-m", "launcher.run", "--standalone", "--nproc-per-node", "1", str(script)],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, env={**os.environ, "ETC_SPARES": "cold"},
    )
    assert run.returncode == 3, run.stderr


@pytest.mark.parametrize(("end", "exit_code"), [("returns", 7), ("killed", 137)])
def test_pid_1_reaps_orphans_hands_signals_on_and_ends_as_the_agent_does(end: str, exit_code: int) -> None:
    run = subprocess.run(
        [*namespace(), sys.executable, "-c", AS_FIRST, end], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.stderr == ""
    assert sorted(run.stdout.splitlines()) == ["got SIGUSR1", "parent 1 zombies []"]
    assert run.returncode == exit_code
