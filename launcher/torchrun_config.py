"""torchrun's own interpretation of its arguments; each of its errors becomes one line that names its source."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.events import get_logging_handler
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, determine_local_world_size

from etc_agent.agent.processes.environment import device_of
from etc_agent.agent.processes.logs import remove_empty_logs
from etc_agent.agent.safety.signals import parse_signals
from etc_agent.errors import EtcError
from etc_agent.torch_private.elastic import event_handlers
from etc_agent.torch_private.logs_specs import set_streams

_LONG_RANKS = re.compile(r"\d+:[0-3](,\d+:[0-3])*")
Command = tuple[LaunchConfig, Callable[..., Any] | str, list[str]]


def launch_config(args: argparse.Namespace, source: Callable[[str], str]) -> Command:
    """torchrun's config, the program or function to run and its arguments.

    `source`: where the option of this name was given, for messages.

    Raises:
        EtcError: torchrun would refuse the arguments, or fail over them later.
    """
    streams = {name: _streams_by_rank(getattr(args, name), source(name)) for name in ("redirects", "tee")}
    for name, by_rank in streams.items():
        if isinstance(by_rank, dict):
            setattr(args, name, "0")
    _check_nodes(args.nnodes, source("nnodes"))
    args.nproc_per_node = str(_num_workers(args.nproc_per_node, source("nproc_per_node")))
    if args.max_restarts < 0:
        raise EtcError(f"{source('max_restarts')}: expected 0 or more, got {args.max_restarts}")
    parse_signals(args.signals_to_handle, source("signals_to_handle"))
    _check_event_handler(args.event_log_handler, source("event_log_handler"))
    for index in range(int(args.nproc_per_node) if args.virtual_local_rank else 0):
        device_of(index, is_virtual=True)
    if args.training_script == "-" and not args.no_python:
        raise EtcError("-: a script on standard input reaches one worker only, once; write it to a file, and name that")
    is_script = args.run_path or not (args.module or args.no_python)
    if is_script and not os.path.exists(args.training_script):
        raise EtcError(f"{args.training_script}: no such training script")
    try:
        config, entrypoint, entrypoint_args = config_from_args(args)
    except (ValueError, AssertionError, RuntimeError, NotADirectoryError) as error:
        raise EtcError(" ".join(str(error).split())) from None
    except OSError as error:
        where = source("log_dir") if args.log_dir else "TMPDIR"
        why = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        raise EtcError(f"{where}: no folder for logs can be made: {why}; name one that can be written") from None
    assert config.logs_specs is not None
    set_streams(config.logs_specs, streams["redirects"], streams["tee"])
    return config, entrypoint, entrypoint_args


def discard(config: LaunchConfig) -> None:
    """Remove what creating `config` has left in the file system: torchrun's temporary log folder."""
    if isinstance(config.logs_specs, DefaultLogsSpecs):
        remove_empty_logs(config.logs_specs)


def _check_nodes(text: str, source: str) -> None:
    bounds = text.split(":")
    if len(bounds) > 2 or not all(part.isdecimal() for part in bounds) or not 0 < int(bounds[0]) <= int(bounds[-1]):
        raise EtcError(f"{source}: {text!r} is not a number of nodes; write 4, or 1:4 for 1 to 4")


def _num_workers(text: str, source: str) -> int:
    try:
        number = determine_local_world_size(text)
    except ValueError as error:
        if str(error).startswith("Unsupported"):
            raise EtcError(f"{source}: {text!r} is not a number of workers; write 8, or gpu, cpu, auto") from None
        raise EtcError(f"{source}: {text}: {error}") from None
    if number < 1:
        raise EtcError(f"{source}: expected at least 1, got {text}")
    return number


def _check_event_handler(name: str, source: str) -> None:
    try:
        get_logging_handler(name)
    except KeyError:
        known = ", ".join(sorted(event_handlers()))
        raise EtcError(f"{source}: {name!r} is not a registered event handler; known: {known}") from None


def _streams_by_rank(text: str, source: str) -> Std | dict[int, Std]:
    """torchrun's ``0:1,1:3``, for local ranks of more than one digit too, which `Std.from_str` refuses."""
    if _LONG_RANKS.fullmatch(text):
        pairs = (pair.split(":") for pair in text.split(","))
        return {int(rank): Std(int(streams)) for rank, streams in pairs}
    try:
        return Std.from_str(text)  # type: ignore[return-value]
    except ValueError:
        raise EtcError(
            f"{source}: {text!r} does not name streams; write 0 to 3, or like 0:1,10:3 (local rank:streams)"
        ) from None
