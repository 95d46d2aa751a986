"""Starting an elastic job from Python, as `torch.distributed.launcher.api` does."""

from __future__ import annotations

import dataclasses
import signal
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api as torch_api
from torch.distributed.launcher.api import LaunchConfig

from etc_agent.agent.job_end import JobEnd
from etc_agent.agent.settings import EtcdSettings, JobSettings, Timeouts
from etc_agent.errors import EtcError
from etc_agent.parallel.config import ParallelConfig
from etc_agent.rendezvous.addresses import refuse_unknown
from launcher.etcd_options import parse_endpoints
from launcher.options import ELASTIC_BACKEND
from launcher.timeouts import with_rdzv_conf

__all__ = ["JobFailed", "JobStopped", "LaunchConfig", "elastic_launch", "launch_agent"]


class JobFailed(EtcError, ChildFailedError):
    """The job has ended with an exit code other than 0.

    `failures`, as torch's `ChildFailedError` has them: this node's failed workers by rank, the one that most likely
    made the others fail first. Where none of this node's has failed there is one entry, of rank -1, which says what is
    known.
    """

    def __init__(self, end: JobEnd, name: str = "the job") -> None:
        ChildFailedError.__init__(self, name, dict(end.failures) or {-1: _elsewhere(end)})
        self.exit_code = end.exit_code
        self.why = end.why

    def __str__(self) -> str:
        return f"the job failed with exit code {self.exit_code}: {self.why}\n{self.format_msg()}"


class JobStopped(EtcError, SignalException):
    """A signal has ended the job. `sigval`: which."""

    def __init__(self, number: int, exit_code: int) -> None:
        SignalException.__init__(self, f"the job was stopped by {signal.Signals(number).name}", signal.Signals(number))
        self.exit_code = exit_code


def _elsewhere(end: JobEnd) -> ProcessFailure:
    """What is known here of a failure on another node."""
    failure = ProcessFailure(local_rank=-1, pid=-1, exitcode=end.exit_code, error_file="")
    failure.message = end.why or failure.message
    return failure


class elastic_launch(torch_api.elastic_launch):
    """Called with its arguments, runs `entrypoint` with them on every worker, and returns when the job has ended.

    With ``rdzv_backend="etcd-v3"`` our agent runs the job: `config.rdzv_endpoint` names the etcd servers, unless `etcd`
    does, and `config.rdzv_configs` may hold any of `Timeouts`. Every other backend goes to torch's own launcher. Both
    return what the function has returned, by rank, for the ranks that this node had at the end of the job.

    Raises:
        EtcError: the config cannot work, in one line; when called: the job could not begin.
        JobFailed: (when called) the job's exit code is not 0.
        JobStopped: (when called) a signal has ended the job.
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: Any = None,
        *,
        etcd: EtcdSettings | None = None,
        parallel: ParallelConfig | None = None,
        allowed: Sequence[ParallelConfig] | None = None,
        global_batch: int | None = None,
    ) -> None:
        super().__init__(config, entrypoint, health_check_server)
        self._settings: JobSettings | None = None
        if config.rdzv_backend != ELASTIC_BACKEND:
            return
        if entrypoint is None:
            raise EtcError("elastic_launch: no entrypoint; give a function, or a program")
        self._settings = _settings(config, entrypoint, etcd, parallel, allowed, global_batch)

    def __call__(self, *args: Any) -> dict[int, Any]:
        if self._settings is None:
            returned: dict[int, Any] = super().__call__(*args)
            return returned
        return run_settings(dataclasses.replace(self._settings, args=args))


def launch_agent(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, args: list[Any], health_check_server: Any = None
) -> dict[int, Any]:
    """`elastic_launch`, called with `args`."""
    return elastic_launch(config, entrypoint, health_check_server)(*args)


def run_settings(settings: JobSettings) -> dict[int, Any]:
    """Run a job of our agent; what its functions have returned.

    Raises:
        EtcError: it could not begin. JobFailed, JobStopped: how it has ended.
    """
    from etc_agent.agent.launch import run_job

    end = run_job(settings)
    if end.stopped_by is not None:
        raise JobStopped(end.stopped_by, end.exit_code)
    if end.exit_code:
        raise JobFailed(end, _name_of(settings.entrypoint))
    return dict(end.returned)


def _name_of(entrypoint: Callable[..., Any] | str) -> str:
    return entrypoint if isinstance(entrypoint, str) else getattr(entrypoint, "__name__", str(entrypoint))


def _settings(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    etcd: EtcdSettings | None,
    parallel: ParallelConfig | None,
    allowed: Sequence[ParallelConfig] | None,
    global_batch: int | None,
) -> JobSettings:
    endpoints = parse_endpoints([config.rdzv_endpoint], "rdzv_endpoint") if etcd is None else etcd.endpoints
    timeouts = dataclasses.replace(Timeouts(), shutdown_grace_s=float(config.shutdown_timeout or 0))
    if config.local_addr:
        refuse_unknown(config.local_addr, "local_addr")
    if not config.run_id and config.max_nodes == 1:
        config.run_id = uuid.uuid4().hex[:8]
    settings = JobSettings(
        entrypoint=entrypoint,
        args=(),
        launch_config=config,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        num_slots=config.nproc_per_node,
        local_addr=config.local_addr,
        etcd=dataclasses.replace(etcd or EtcdSettings(), endpoints=endpoints),
        parallel=parallel,
        allowed=None if allowed is None else tuple(allowed),
        global_batch=global_batch,
        max_restarts=config.max_restarts,
        monitor_interval_s=config.monitor_interval,
        timeouts=with_rdzv_conf(timeouts, config.rdzv_configs),
    )
    for chosen in (*(settings.allowed or ()), *([parallel] if parallel else ())):
        if (reason := settings.refusal_here(chosen)) is not None:
            raise EtcError(reason)
    return settings
