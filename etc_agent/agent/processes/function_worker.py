"""Runs a function as a worker, in a process made by multiprocessing. Has few imports, since every worker loads it.

torchelastic starts each script in a session (`setsid`) of its own, but not functions. The agent and its guardian end a
worker through its process group, so a process that runs a function first becomes the leader of one.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Place:
    """The context of one worker. `environment`: all of its variables. `stdout`, `stderr`: files for its output, "" for
    the agent's own output. `result_file`: where the function's pickled return value is written."""

    slot: int
    environment: Mapping[str, str]
    stdout: str
    stderr: str
    result_file: str


def run_spawned(function: Callable[..., Any], args: tuple[Any, ...], numa_options: Any, place: Place) -> None:
    """`run_function` in a process that does not lead a process group yet."""
    os.setsid()
    run_function(function, args, numa_options, place)


def run_function(function: Callable[..., Any], args: tuple[Any, ...], numa_options: Any, place: Place) -> None:
    """In the worker's process: call `function` as torchelastic does, and store what it returns."""
    os.environ.update(place.environment)
    for descriptor, file in ((1, place.stdout), (2, place.stderr)):
        if file:
            _redirect(descriptor, file)
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.elastic.utils import macros

    from etc_agent.agent.processes.numa import bind_here
    from etc_agent.agent.processes.torch_hook import install_here

    install_here()
    own_args = tuple(macros.substitute(list(args), str(place.slot)))
    bind_here(place.slot, numa_options)
    returned = record(function)(*own_args)
    Path(place.result_file).write_bytes(pickle.dumps(returned))


def _redirect(descriptor: int, file: str) -> None:
    """Send everything that this process writes to `descriptor`, by any library, to `file`."""
    stream = sys.stdout if descriptor == 1 else sys.stderr
    stream.flush()
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(opened, descriptor)
    os.close(opened)
    if isinstance(stream, io.TextIOWrapper):  # not where a notebook has replaced the stream
        stream.reconfigure(line_buffering=True)
