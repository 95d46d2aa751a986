"""Command line over environment over job file over defaults, merged into one `JobSettings`."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import os
import uuid
from typing import Any

from etc_agent.agent.settings import Failures, JobSettings, Spares, Timeouts
from etc_agent.control.redundancy import Redundancy, Scheme
from etc_agent.errors import EtcError
from etc_agent.parallel.config import ParallelConfig
from etc_agent.rendezvous.addresses import refuse_unknown
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.ports import ANY_PORT, PortRange
from launcher.commands import checkpoint, forward_signals, preemption, preflight
from launcher.etcd_settings import etcd_settings
from launcher.given import Given
from launcher.job import Job
from launcher.options import ELASTIC_BACKEND
from launcher.telemetry import telemetry
from launcher.timeouts import with_rdzv_conf
from launcher.torchrun_config import discard, launch_config

# torchrun's options -> the job file's fields of the same meaning.
_FIELDS = {
    "nnodes": "nodes", "nproc_per_node": "workers_per_node", "redirects": "logs.redirects", "tee": "logs.tee",
    "log_dir": "logs.dir", "local_ranks_filter": "logs.local_ranks_filter", "monitor_interval": "monitor_interval_s",
}


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
    saved = checkpoint(given)
    timeouts, parallel, allowed = _timeouts(given), _parallel(given), _allowed(given)
    if args.local_addr:
        refuse_unknown(args.local_addr, given.source("local_addr", "local_addr"))
    JobKeys(run_id, etcd.prefix)  # refuses a name that cannot be part of an etcd key
    config, entrypoint, entrypoint_args = launch_config(args, lambda name: given.source(name, _FIELDS.get(name, name)))
    if given.job.timeouts.shutdown_grace_s is None or given.line.given("shutdown_timeout"):
        assert config.shutdown_timeout is not None
        timeouts = dataclasses.replace(timeouts, shutdown_grace_s=float(config.shutdown_timeout))
    settings = JobSettings(
        entrypoint=entrypoint,
        args=tuple(entrypoint_args),
        launch_config=config,
        run_id=run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        num_slots=config.nproc_per_node,
        local_addr=config.local_addr,
        node_rank=node_rank,
        standalone=standalone,
        etcd=etcd,
        parallel=parallel,
        allowed=allowed,
        pack=job.parallel.pack,
        model=job.model_facts,
        global_batch=job.global_batch,
        max_restarts=config.max_restarts,
        alike_failures=job.alike_failures,
        failures=_failures(job),
        spares=_spares(given),
        redundancy=Redundancy(**job.redundancy.model_dump()),
        preflight=preflight(given),
        preemption=preemption(given),
        forward_signals=forward_signals(given, config.signals_to_handle),
        port_range=_port_range(given),
        monitor_interval_s=config.monitor_interval,
        timeouts=timeouts,
        checkpoint=saved,
        env={**(saved.variables() if saved else {}), **job.env},
        telemetry=telemetry(given),
    )
    try:
        if standalone and settings.min_nodes > 1:
            raise EtcError(
                f"{given.source('nnodes', 'nodes')}: --standalone is a job of one node, and would wait for "
                f"{settings.min_nodes} in vain; leave it out, or give --etcd-endpoints HOST:PORT on every node"
            )
        if settings.redundancy.scheme is Scheme.PARITY and settings.max_nodes < 2:
            raise EtcError(
                f"{given.source('nnodes', 'nodes')}: redundancy: parity needs at least 2 nodes, got 1; "
                "give more, or write redundancy: peer"
            )
        _check_configs(given, settings)
    except EtcError:
        discard(config)
        raise
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


def _node_rank(given: Given) -> int | None:
    """The rank in the order of nodes that the user asked for, if any."""
    if given.line.given("node_rank"):
        return int(given.line.args.node_rank)
    text = given.rdzv_conf.get("node_rank", given.rdzv_conf.get("rank"))
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


def _failures(job: Job) -> Failures:
    section = job.failures
    return Failures(section.raised == "replace", section.max_per_window, section.window_s)


def _timeouts(given: Given) -> Timeouts:
    """The file's timeouts, changed by ``--rdzv-conf settle_s=2,...``."""
    return with_rdzv_conf(Timeouts(**given.job.timeouts.model_dump(exclude_none=True)), given.rdzv_conf)


def _spares(given: Given) -> Spares:
    text = os.environ.get("ETC_SPARES") or given.job.spares
    if text not in list(Spares):
        raise EtcError(f"ETC_SPARES: expected one of {', '.join(Spares)}, got {text!r}")
    return Spares(text)


def _port_range(given: Given) -> PortRange:
    text = given.option("port_range")
    if text is None:
        return given.job.port_range or ANY_PORT
    try:
        return PortRange.parse(text)
    except ValueError as error:
        raise EtcError(f"{given.source('port_range', '')}: {error}") from None


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
    """Check the configs again with the options that were given in addition to the job file."""
    named = [(given.source("allowed", "parallel.allowed"), config) for config in settings.allowed or ()]
    if settings.parallel is not None:
        named.append((given.source("parallel", "parallel.initial"), settings.parallel))
    for source, config in named:
        if (reason := settings.refusal_here(config)) is not None:
            raise EtcError(f"{source}: {reason}")
