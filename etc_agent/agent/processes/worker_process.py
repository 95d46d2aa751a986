"""One worker process on one slot, started through torch.distributed.elastic."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from string import Template
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsSpecs, PContext
from torch.distributed.elastic.multiprocessing.api import RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from etc_agent.agent.processes.error_file import read, set_aside
from etc_agent.agent.processes.logs import full_folder
from etc_agent.agent.processes.programs import Program
from etc_agent.agent.processes.tee import Tee, WithoutTee
from etc_agent.agent.processes.torch_events import TorchEvents
from etc_agent.control.causes import ErrorKind
from etc_agent.control.messages import Raised
from etc_agent.errors import shortened
from etc_agent.reconfig.known.records import Failure, FailureKind

logger = logging.getLogger(__name__)

_FAILURES = {
    ErrorKind.MODEL: FailureKind.RAISED,
    ErrorKind.RAISED: FailureKind.RAISED,
    ErrorKind.UNCLEAR: FailureKind.UNCLEAR,
    ErrorKind.PEER_LOST: FailureKind.PEER_LOST,
}


class WorkerProcess:
    """A running worker. A torchelastic process context starts and stops as a whole, so each worker has its own."""

    def __init__(
        self, context: PContext, environment: dict[str, str], events: TorchEvents, tee: Tee, launch_config: Any
    ) -> None:
        self._context, self._tee, self._launch_config = context, tee, launch_config
        self._environment = environment
        self._events = events
        self.pid: int = context.pids()[0]
        self.exit_code: int | None = None
        self.killed_by = 0
        self.raised: Raised | None = None
        self._term_at: float | None = None
        self._kill_at = float("inf")
        self._stop_signal: int = signal.SIGTERM
        self._is_asked = False
        self._is_excused = False
        self._error_file = ""
        self.process_failure: ProcessFailure | None = None
        self.returned: Any = None

    @classmethod
    def start(
        cls,
        program: Program,
        launch_config: Any,
        slot: int,
        environment: dict[str, str],
        logs: LogsSpecs,
        events: TorchEvents,
    ) -> WorkerProcess:
        """Start `program` in slot `slot`; see `worker_environment` for `environment`, `NodeLogs` for `logs`. Without
        RANK in the environment it is a warm spare until `begin`. `launch_config`: torchrun's LaunchConfig.

        Raises:
            EtcError: there is no such program, or it cannot be bound to CPUs.
        """
        prefix = _prefix(launch_config, slot, environment.get("RANK", "spare"))
        shown = WithoutTee(logs)
        context = program.start(slot, environment, shown)
        assert shown.destinations is not None
        filters = (launch_config.duplicate_stdout_filters, launch_config.duplicate_stderr_filters)
        process = cls(context, environment, events, Tee(shown.destinations, prefix, filters), launch_config)
        if "RANK" in environment:
            events.worker_started(environment, process.pid)
        return process

    @property
    def rank(self) -> int:
        """The rank that it was started with."""
        return int(self._environment["RANK"])

    def begin(self, slot: int, environment: dict[str, str]) -> None:
        """From now on this warm spare is the worker in slot `slot`."""
        self._environment = environment
        self._tee.prefix = _prefix(self._launch_config, slot, environment["RANK"])
        self._events.worker_started(environment, self.pid)

    def poll(self) -> int | None:
        """The exit code once the process has ended (128 + signal where one ended it), else None. Never blocks."""
        if self.exit_code is None:
            self._signal_if_due()
            result = self._ended()
            if result is not None:
                self.process_failure = failure = result.failures.get(0)
                self.returned = result.return_values.get(0)
                code = failure.exitcode if failure else 0
                self.exit_code = 128 - code if code < 0 else code
                self.killed_by = max(-code, 0)
                self._error_file = self._context.error_files[0]
                self._tee.close()
                if code and (full := full_folder(self._context)) is not None:
                    logger.error("no space left for a worker's output in %s; free some, or change --log-dir", full)
                if "RANK" in self._environment:
                    error = json.dumps(failure.error_file_data) if failure else None
                    self._events.worker_ended(
                        self._environment, self.pid, code, was_stopped=self.is_stopping, error=error
                    )
        return self.exit_code

    def _ended(self) -> RunProcsResult | None:
        try:
            return self._context.wait(timeout=0)
        except Exception:
            # torch reads the error file of a failed worker and raises if it is incomplete: the worker was killed while
            # writing it, the disk was full, or the script wrote something else there.
            set_aside(self._context.error_files[0])
            return self._context.wait(timeout=0)

    def stop(self, grace_s: float, *, after_s: float = 0.0, number: int = signal.SIGTERM) -> None:
        """Make `poll` end this process: signal `number` to its group in `after_s` seconds (it may be about to exit by
        itself), SIGKILL `grace_s` later. A repeated call can only make it sooner."""
        self._stop_signal = number
        at = time.monotonic() + after_s
        self._term_at = at if self._term_at is None else min(self._term_at, at)
        self._kill_at = min(self._kill_at, at + grace_s)
        self._signal_if_due()

    def excuse(self) -> None:
        """It has ended because of a signal that was meant for its whole node, which is no failure of its own."""
        self._is_excused = True

    def send_signal(self, number: int) -> None:
        """Send a signal to the process alone, not to its children."""
        if self.exit_code is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    @property
    def is_stopping(self) -> bool:
        return self._term_at is not None

    @property
    def was_asked(self) -> bool:
        """Whether the signal to end was sent to it."""
        return self._is_asked

    def _signal_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._kill_at:
            self._signal(signal.SIGKILL)
        elif self._term_at is not None and now >= self._term_at and not self._is_asked:
            self._is_asked = True
            self._signal(self._stop_signal)

    def kill_group(self) -> None:
        """Kill everything that is left of its process group."""
        self._signal(signal.SIGKILL)

    def failure(self, slot: str) -> Failure | None:
        """Why it ended; None where it is running, exited with code 0, or was told to end."""
        if not self.exit_code or self.is_stopping or self._is_excused:
            return None
        if self.killed_by and not self.raised:
            name = _signal_name(self.killed_by)
            return Failure(slot, FailureKind.KILLED, self.exit_code, f"pid {self.pid} was killed by {name}")
        raised = self.raised or read(self._error_file)
        if raised is None:
            ended = f"pid {self.pid} ended with exit code {self.exit_code}"
            return Failure(slot, FailureKind.SILENT, self.exit_code, ended)
        return Failure(slot, _FAILURES[raised.kind], self.exit_code, shortened(raised.error))

    def _signal(self, number: int) -> None:
        """Send a signal to its process group. A process that runs a function makes itself the group's leader when it
        begins; before that it has no children, and is signalled alone."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            self.send_signal(number)
        except PermissionError:
            pass


def _prefix(launch_config: Any, slot: int, rank: str) -> str:
    """What is shown before each line of a worker's output."""
    template = launch_config.log_line_prefix_template or f"[{launch_config.role}{slot}]:"
    return Template(template).safe_substitute(role_name=launch_config.role, rank=rank, local_rank=slot)


def _signal_name(number: int) -> str:
    """The name of a signal; real-time signals have numbers only."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
