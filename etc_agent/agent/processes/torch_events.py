"""torchelastic's events and metrics, as torchrun records them: ``--event-log-handler`` and `metrics.configure`.

A worker's end is recorded when it ends, not at the end of the job, since workers come and go.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.events import Event, EventMetadataValue, EventSource

from etc_agent.control.channel import GENERATION_VARIABLE, SLOT_VARIABLE

_BACKEND = "etcd-v3"


class TorchEvents:
    """The events and metrics of one agent. `launch_config`: torchrun's LaunchConfig."""

    def __init__(self, launch_config: Any, entrypoint: str | Callable[..., Any]) -> None:
        metrics.initialize_metrics(metrics.MetricsConfig(launch_config.metrics_cfg))
        self._config = launch_config
        self._entrypoint = _name_of(entrypoint)
        self._hostname = socket.getfqdn(socket.gethostname())
        self._started = self._idle_since = time.monotonic()
        self._group: dict[str, str] = {}
        self._total_s = 0

    def worker_started(self, environment: Mapping[str, str], pid: int) -> None:
        """`environment`: of the worker. The first worker of a generation ends a rendezvous."""
        if environment[GENERATION_VARIABLE] != self._group.get(GENERATION_VARIABLE):
            waited_ms = (time.monotonic() - self._idle_since) * 1000
            self._group = dict(environment)
            self._record("RENDEZVOUS", EventSource.AGENT, self._group, duration_ms=waited_ms)
            left = int(environment["TORCHELASTIC_MAX_RESTARTS"]) - int(environment["TORCHELASTIC_RESTART_COUNT"])
            self._count("remaining_restarts", left)
        self._record("START", EventSource.WORKER, environment, pid=pid)

    def worker_ended(
        self, environment: Mapping[str, str], pid: int, exit_code: int, *, was_stopped: bool, error: str | None
    ) -> None:
        """`exit_code`: of the process, negative for a signal. `error`: the JSON of its error file, if there is one."""
        self._idle_since = time.monotonic()
        if was_stopped:
            self._record("TERMINATED", EventSource.WORKER, environment, pid=pid)
        elif exit_code == 0:
            self._record("SUCCEEDED", EventSource.WORKER, environment, pid=pid)
        else:
            failure = {"exit_code": exit_code, "worker_pid": pid}
            self._record("FAILED", EventSource.WORKER, environment, pid=pid, error=error, failure=failure)

    def agent_ended(self, *, is_failed: bool) -> None:
        """The agent has run the job to its end, successful or not."""
        self._total_s = int(time.monotonic() - self._started)
        restarts = int(self._group.get("TORCHELASTIC_RESTART_COUNT", 0))
        allowed = self._config.max_restarts
        self._count("run_total", 1)
        for outcome, has_failed in (("success", False), ("failed", True)):
            for retries, has_retried in (("with_retries", True), ("no_retries", False)):
                is_this = (is_failed, restarts > 0) == (has_failed, has_retried)
                self._count(f"run_{outcome}_{retries}", int(is_this))
        self._count("failed" if is_failed else "succeeded", 1)
        flakiness = 100.0 if is_failed else 100.0 - 100.0 * (allowed - restarts + 1) / (allowed + 1)
        self._count("flakiness", int(flakiness))
        self._record("SUCCEEDED", EventSource.AGENT, self._group)

    def agent_broken(self, error: str) -> None:
        """The agent ends before the job does: by a signal, or by an error of its own. `error`: why."""
        self._total_s = int(time.monotonic() - self._started)
        self._record("FAILED", EventSource.AGENT, self._group, error=error)

    def _count(self, name: str, value: int) -> None:
        metrics.put_metric(f"workers.{self._config.role}.{name}", value)

    def _record(
        self,
        state: str,
        source: EventSource,
        environment: Mapping[str, str],
        *,
        pid: int | None = None,
        duration_ms: float | None = None,
        error: str | None = None,
        failure: Mapping[str, int] | None = None,
    ) -> None:
        def number(name: str) -> int | None:
            return int(environment[name]) if name in environment else None

        details: dict[str, Any] = {"group_world_size": number("GROUP_WORLD_SIZE"), "entry_point": self._entrypoint}
        is_worker = source is EventSource.WORKER
        if is_worker:  # torchrun records each of these as a list with one entry
            details["local_rank"] = [number(SLOT_VARIABLE)]
            details["role_rank"] = [number("ROLE_RANK")]
            details["role_world_size"] = [number("ROLE_WORLD_SIZE")]
            details["exit_code"] = [failure["exit_code"] if failure else None]
            details["worker_pid"] = [failure["worker_pid"] if failure else None]
        metadata: dict[str, EventMetadataValue] = {
            "run_id": self._config.run_id,
            "global_rank": number("RANK") if is_worker else None,
            "group_rank": number("GROUP_RANK"),
            "worker_id": str(pid) if is_worker else None,
            "role": self._config.role,
            "hostname": self._hostname,
            "state": state,
            "total_run_time": self._total_s,
            "rdzv_backend": _BACKEND,
            "raw_error": error,
            "metadata": json.dumps(details),
            "agent_restarts": number("TORCHELASTIC_RESTART_COUNT") or 0,
            "duration_ms": duration_ms,
        }
        event = Event(f"torchelastic.worker.status.{state}", source=source, metadata=metadata)
        events.record(event, self._config.event_log_handler)


def _name_of(entrypoint: str | Callable[..., Any]) -> str:
    """The name of what is called; some callables, such as a `functools.partial`, have none."""
    if isinstance(entrypoint, str):
        return os.path.basename(entrypoint)
    return getattr(entrypoint, "__qualname__", type(entrypoint).__name__)
