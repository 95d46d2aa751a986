"""Starting an elastic job from Python, as `torch.distributed.launcher.api.elastic_launch` does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.launcher.api import elastic_launch as torch_elastic_launch

from etc_agent.agent.settings import EtcdSettings, JobSettings, Timeouts
from etc_agent.errors import EtcError
from etc_agent.parallel.config import ParallelConfig
from launcher.etcd_options import parse_endpoints
from launcher.options import ELASTIC_BACKEND
from launcher.timeouts import with_rdzv_conf


class JobFailed(EtcError):
    """The job ended with an exit code other than 0. What went wrong is on standard error and in the error files."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the job failed with exit code {exit_code}")
        self.exit_code = exit_code


def elastic_launch(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    *,
    etcd: EtcdSettings | None = None,
    parallel: ParallelConfig | None = None,
    allowed: Sequence[ParallelConfig] | None = None,
    global_batch: int | None = None,
) -> Callable[..., dict[int, Any]]:
    """A function that runs `entrypoint` with its arguments on every worker, and returns when the job has ended.

    With ``rdzv_backend="etcd-v3"`` our agent runs the job: `config.rdzv_endpoint` names the etcd servers, unless `etcd`
    does, and `config.rdzv_configs` may hold any of `Timeouts`. It returns an empty dict, since ranks come and go. Every
    other backend goes to torch's own launcher, which returns what each rank's function returned.

    Raises:
        EtcError: the config cannot work, in one line.
        JobFailed: (when called) the job's exit code is not 0.
    """
    if config.rdzv_backend != ELASTIC_BACKEND:
        return torch_elastic_launch(config, entrypoint)
    endpoints = parse_endpoints([config.rdzv_endpoint], "rdzv_endpoint") if etcd is None else etcd.endpoints
    timeouts = dataclasses.replace(Timeouts(), shutdown_grace_s=float(config.shutdown_timeout or 0))
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

    def launch(*args: Any) -> dict[int, Any]:
        from etc_agent.agent.launch import run_job

        exit_code = run_job(dataclasses.replace(settings, args=args))
        if exit_code:
            raise JobFailed(exit_code)
        return {}

    return launch
