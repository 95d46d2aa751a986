"""Command line over environment over job file over defaults, merged into one `JobSettings`."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import os
import re
import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args

from etc_agent.agent.settings import JobSettings, Timeouts
from etc_agent.errors import EtcError
from etc_agent.parallel.config import ParallelConfig
from etc_agent.rendezvous.keys import JobKeys
from launcher.etcd_settings import etcd_settings
from launcher.given import Given
from launcher.options import ELASTIC_BACKEND
from launcher.timeouts import with_rdzv_conf

_LONG_RANKS = re.compile(r"\d+:[0-3](,\d+:[0-3])*")


def job_settings(given: Given, standalone: bool) -> JobSettings:
    """The settings of an elastic job: with a private etcd if `standalone`, else with the etcd that was given.

    Raises:
        EtcError: something is missing, wrong or impossible; one line that names its source.
    """
    args, job = torchrun_args(given), given.job
    etcd = etcd_settings(given, standalone)
    run_id = _run_id(given, standalone)
    node_rank = _node_rank(given)
    # torchrun's own code reads the arguments; what it would only warn about is told to the agent instead.
    args.rdzv_backend, args.rdzv_id, args.node_rank = ELASTIC_BACKEND, run_id, 0
    args.rdzv_endpoint = ",".join(etcd.endpoints) or "localhost:0"
    launch_config, entrypoint, entrypoint_args = _launch_config(args)
    timeouts = _timeouts(given, launch_config)
    allowed = _allowed(given)
    settings = JobSettings(
        entrypoint=entrypoint,
        args=tuple(entrypoint_args),
        launch_config=launch_config,
        run_id=run_id,
        min_nodes=launch_config.min_nodes,
        max_nodes=launch_config.max_nodes,
        num_slots=launch_config.nproc_per_node,
        local_addr=launch_config.local_addr,
        node_rank=node_rank,
        standalone=standalone,
        etcd=etcd,
        parallel=_parallel(given),
        allowed=allowed,
        pack=job.parallel.pack,
        model=job.model_facts,
        global_batch=job.global_batch,
        max_restarts=launch_config.max_restarts,
        alike_failures=job.alike_failures,
        monitor_interval_s=launch_config.monitor_interval,
        timeouts=timeouts,
        env=dict(job.env),
    )
    _check_configs(given, settings)
    JobKeys(settings.run_id, settings.etcd.prefix)  # refuses a name that cannot be part of an etcd key
    return settings


def torchrun_args(given: Given) -> argparse.Namespace:
    """torchrun's arguments with the job file's values where neither command line nor environment gave one."""
    args, job = copy.copy(given.line.args), given.job

    def fill(name: str, value: Any) -> None:
        if value is not None and given.line.given(name) is None:
            setattr(args, name, value)

    if job.nodes is not None:
        fill("nnodes", f"{job.nodes.min}:{job.nodes.max}")
    fill("nproc_per_node", None if job.workers_per_node is None else str(job.workers_per_node))
    fill("max_restarts", job.max_restarts)
    fill("monitor_interval", job.monitor_interval_s)
    fill("log_dir", None if job.logs.dir is None else str(job.logs.dir))
    fill("redirects", job.logs.redirects)
    fill("tee", job.logs.tee)
    fill("local_ranks_filter", ",".join(map(str, job.logs.local_ranks_filter or [])) or None)
    if job.timeouts.shutdown_grace_s is not None and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in os.environ:
        fill("shutdown_timeout", math.ceil(job.timeouts.shutdown_grace_s))
    if args.training_script is None:
        _fill_command(args, given)
    return args


def _fill_command(args: argparse.Namespace, given: Given) -> None:
    job = given.job
    if job.command is None:
        raise EtcError(f"{given.file}: command: missing; give one there, or a training script on the command line")
    program, *args.training_script_args = job.command
    if job.run_as == "script" or (job.run_as == "program" and "/" in program):
        program = os.path.normpath(given.folder / program)
        if not os.path.exists(program):
            raise EtcError(f"{given.file}: command: {program} does not exist (paths start at the job file's folder)")
    args.training_script = program
    args.module, args.no_python = job.run_as == "module", job.run_as == "program"


def _launch_config(args: argparse.Namespace) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """What torchrun makes of its arguments, with each of its complaints as one line."""
    streams = {name: _streams_by_rank(getattr(args, name)) for name in ("redirects", "tee")}
    for name, by_rank in streams.items():
        if isinstance(by_rank, dict):
            setattr(args, name, "0")
    nnodes = args.nnodes.split(":")
    if len(nnodes) > 2 or not all(part.isdecimal() for part in nnodes) or not 0 < int(nnodes[0]) <= int(nnodes[-1]):
        raise EtcError(f"--nnodes: {args.nnodes!r} is not a number of nodes; write 4, or 1:4 for 1 to 4")
    is_script = args.run_path or not (args.module or args.no_python)
    if is_script and not os.path.exists(args.training_script):
        raise EtcError(f"{args.training_script}: no such training script")
    try:
        config, entrypoint, entrypoint_args = config_from_args(args)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise EtcError(" ".join(str(error).split())) from None
    if config.nproc_per_node < 1:
        raise EtcError(f"--nproc-per-node: expected at least 1, got {args.nproc_per_node}")
    if any(isinstance(by_rank, dict) for by_rank in streams.values()):
        assert config.logs_specs is not None
        config.logs_specs = type(config.logs_specs)(
            log_dir=args.log_dir,
            redirects=streams["redirects"],
            tee=streams["tee"],
            local_ranks_filter=config.logs_specs._local_ranks_filter,
        )
    return config, entrypoint, entrypoint_args


def _streams_by_rank(text: str) -> Std | dict[int, Std]:
    """torchrun's ``0:1,1:3``, for local ranks of more than one digit too, which `Std.from_str` refuses."""
    if _LONG_RANKS.fullmatch(text):
        pairs = (pair.split(":") for pair in text.split(","))
        return {int(rank): Std(int(streams)) for rank, streams in pairs}
    try:
        return Std.from_str(text)  # type: ignore[return-value]
    except ValueError:
        raise EtcError(f"{text!r} does not name streams; write 0 to 3, or like 0:1,10:3 (local rank:streams)") from None


def _node_rank(given: Given) -> int | None:
    """The place in the order of nodes that the user asked for, if any."""
    if given.line.given("node_rank"):
        return int(given.line.args.node_rank)
    text = given.rdzv_conf.get("node_rank")
    if text is not None and not text.isdecimal():
        raise EtcError(f"--rdzv-conf: node_rank: expected a number from 0, got {text!r}")
    return None if text is None else int(text)


def _run_id(given: Given, standalone: bool) -> str:
    chosen = given.option("rdzv_id") or given.job.rendezvous.run_id
    if chosen is not None:
        return str(chosen)
    if standalone:
        return uuid.uuid4().hex[:8]
    raise EtcError("the job has no name, which the nodes find each other by; give the same --rdzv-id NAME on each node")


def _timeouts(given: Given, launch_config: LaunchConfig) -> Timeouts:
    """The file's timeouts, changed by ``--rdzv-conf settle_s=2,...``; torchrun's shutdown timeout is ours."""
    timeouts = Timeouts(**given.job.timeouts.model_dump(exclude_none=True))
    if given.job.timeouts.shutdown_grace_s is None or given.line.given("shutdown_timeout"):
        assert launch_config.shutdown_timeout is not None
        timeouts = dataclasses.replace(timeouts, shutdown_grace_s=float(launch_config.shutdown_timeout))
    return with_rdzv_conf(timeouts, given.rdzv_conf)


def _parse_config(text: str, source: str) -> ParallelConfig:
    try:
        return ParallelConfig.parse(text)
    except ValueError as error:
        raise EtcError(f"{source}: {error}") from None


def _parallel(given: Given) -> ParallelConfig | None:
    text = given.option("parallel")
    return given.job.parallel.initial if text is None else _parse_config(text, given.source("parallel", ""))


def _allowed(given: Given) -> tuple[ParallelConfig, ...] | None:
    text = given.option("allowed")
    if text is None:
        return None if given.job.parallel.allowed is None else tuple(given.job.parallel.allowed)
    return tuple(_parse_config(part, given.source("allowed", "")) for part in text.split(","))


def _check_configs(given: Given, settings: JobSettings) -> None:
    """The file was checked by itself; here its configs meet the options that were given over it."""
    named = [(given.source("allowed", "parallel.allowed"), config) for config in settings.allowed or ()]
    if settings.parallel is not None:
        named.append((given.source("parallel", "parallel.initial"), settings.parallel))
    for source, config in named:
        if (reason := settings.refusal(config)) is not None:
            raise EtcError(f"{source}: {reason}")
