"""Workers that run a function: under ``--run-path``, and from `launcher.elastic_launch`.

torchelastic's own context for functions is not used, for three reasons: its processes lead no process group, so they
and their children cannot be ended reliably; it waits without limit for a process that has returned; and with start
method fork it copies the agent, whose etcd client has threads and locks that do not survive a fork.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.elastic.multiprocessing import LogsSpecs, PContext
from torch.distributed.elastic.multiprocessing.api import RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from etc_agent.agent.processes.fork_server import ForkServer
from etc_agent.agent.processes.function_worker import Place, run_function, run_spawned
from etc_agent.agent.processes.programs import Program, Script
from etc_agent.agent.settings import JobSettings
from etc_agent.control.channel import SOCKET_VARIABLE
from etc_agent.errors import EtcError

logger = logging.getLogger(__name__)

_SERVER_GONE = 255
"""The exit code that multiprocessing gives for a process whose fork server is gone."""
_NOT_SENDABLE = (pickle.PicklingError, AttributeError, TypeError)
"""What pickle raises for what it cannot write."""
Call = tuple[Callable[..., Any], tuple[Any, ...], Any]
"""A function, its arguments, and how its process is bound to CPUs (torch's NumaOptions, or None)."""


class FunctionProcess(Protocol):
    """A process that runs a function. `poll`: its exit code once it has ended (negative for a signal); never blocks."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Function:
    """A user's function. `launch_config`: torchrun's LaunchConfig. `start_process`: starts one process of it."""

    launch_config: Any
    start_process: Callable[[Place], FunctionProcess]

    def start(self, slot: int, environment: dict[str, str], logs: LogsSpecs) -> PContext:
        context = _FunctionContext(self, slot, environment, logs)
        context.start()
        return context


@contextmanager
def worker_program(settings: JobSettings) -> Iterator[Program]:
    """The program that this job's workers run.

    Enter this context before the process connects to etcd or changes its signal handlers: with start method fork,
    workers are copies of the process as it is now.
    """
    config, function, args = settings.launch_config, settings.entrypoint, tuple(settings.args)
    if isinstance(function, str):
        yield Script(config, function, args)
        return
    call: Call = (function, args, config.numa_options)
    if config.start_method != "fork":
        _refuse_unsendable(function, config.start_method)
        yield Function(config, lambda place: _Started(config.start_method, call, place))
        return
    server = ForkServer(lambda place: run_function(*call, place))
    try:
        yield Function(config, server.start)
    finally:
        server.close()


def _refuse_unsendable(function: Callable[..., Any], method: str) -> None:
    """Before this node joins, so that no half-begun job is left in etcd. Arguments are found out when a process starts:
    queues and locks can be sent only then."""
    try:
        ForkingPickler.dumps(function)
    except _NOT_SENDABLE as error:
        raise _unsendable(method, error) from None


def _unsendable(method: str, error: Exception) -> EtcError:
    return EtcError(
        f"the workers' function or its arguments cannot be sent to a process that is started by {method}: "
        f"{error}; define the function at the top of a module, or choose start_method=\"fork\""
    )


class _Started:
    """A process that was spawned, or forked by multiprocessing's own server.

    That server does not ignore the signals that a scheduler sends to all processes of a job. When it dies of one,
    multiprocessing considers its processes ended with exit code 255, although they may still be handing over their
    state.
    """

    def __init__(self, method: str, call: Call, place: Place) -> None:
        context: Any = multiprocessing.get_context(method)
        self._process = context.Process(target=run_spawned, args=(*call, place))
        self._result_file = Path(place.result_file)
        try:
            self._process.start()
        except _NOT_SENDABLE as error:
            raise _unsendable(method, error) from None

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def poll(self) -> int | None:
        exit_code: int | None = self._process.exitcode
        if exit_code != _SERVER_GONE:
            return exit_code
        if _is_running(self.pid):
            return None
        return 0 if self._result_file.exists() else exit_code


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


class _FunctionContext(PContext):
    """torchelastic's view of one worker process, with its logs and error file."""

    def __init__(self, function: Function, slot: int, environment: dict[str, str], logs: LogsSpecs) -> None:
        role = function.launch_config.role
        super().__init__(role, function.start_process, {0: ()}, {0: environment}, logs)
        self._function, self._slot = function, slot
        # The folder of the control socket is private to the agent and is removed with it.
        self._result_file = Path(environment[SOCKET_VARIABLE]).parent / f"returned-{uuid.uuid4().hex}"
        self._process: FunctionProcess | None = None

    def _start(self) -> None:
        environment = {**os.environ, **self.envs[0]}
        place = Place(self._slot, environment, self.stdouts[0], self.stderrs[0], str(self._result_file))
        self._process = self._function.start_process(place)

    def pids(self) -> dict[int, int]:
        assert self._process is not None
        return {0: self._process.pid}

    def _poll(self) -> RunProcsResult | None:
        assert self._process is not None
        exit_code = self._process.poll()
        if exit_code is None:
            return None
        self.close()
        if exit_code:
            failure = ProcessFailure(0, self._process.pid, exit_code, self.error_files[0])
            return RunProcsResult(failures={0: failure}, stdouts=self.stdouts, stderrs=self.stderrs)
        return RunProcsResult(return_values={0: self._returned()}, stdouts=self.stdouts, stderrs=self.stderrs)

    def _returned(self) -> Any:
        """The return value of the function; None where the process exited with 0 earlier, for example by `os._exit`."""
        try:
            return pickle.loads(self._result_file.read_bytes())
        except FileNotFoundError:
            return None
        except Exception as error:  # unpickling runs code of the user's classes
            logger.warning("a worker's return value cannot be unpickled here, so it is None: %s", error)
            return None
        finally:
            self._result_file.unlink(missing_ok=True)

    def _close(self, death_sig: object, timeout: int = 30) -> None:
        """The agent ends the process; nothing else has to be freed here."""
