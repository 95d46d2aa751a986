"""Binding a worker to the CPUs near its accelerator: torchrun's ``--numa-binding``.

torch binds by the position of a process in its context. Each of our workers has a context of its own, so the binding is
made here, by its slot.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from torch.numa.binding import (
    NumaOptions,
    _maybe_apply_numa_binding_to_current_process,
    _maybe_wrap_command_args_with_numa_binding,
)

from etc_agent.errors import EtcError

Command = tuple[str | Callable[..., Any], tuple[Any, ...]]


def bound(
    entrypoint: str | Callable[..., Any], args: tuple[Any, ...], slot: int, options: NumaOptions | None
) -> Command:
    """`entrypoint` and `args` of a worker that runs near accelerator `slot`; unchanged where `options` is None.

    Raises:
        EtcError: the CPUs near that accelerator cannot be found, or there is no numactl to bind a program with.
    """
    if options is None:
        return entrypoint, args
    if not isinstance(entrypoint, str):
        return run_bound, (slot, options, entrypoint, *args)
    if shutil.which("numactl") is None and not options.should_fall_back_if_binding_fails:
        raise EtcError("--numa-binding needs the program numactl; install it (apt-get install numactl)")
    try:
        program, *rest = _maybe_wrap_command_args_with_numa_binding(
            (entrypoint, *map(str, args)), gpu_index=slot, numa_options=options
        )
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        mode = options.affinity_mode.value
        raise EtcError(f"--numa-binding={mode}: no CPUs were found near accelerator {slot}: {reason}") from None
    return program, tuple(rest)


def run_bound(slot: int, options: NumaOptions, function: Callable[..., Any], *args: Any) -> Any:
    """In the worker's process: bind it, then call `function`."""
    _maybe_apply_numa_binding_to_current_process(gpu_index=slot, numa_options=options)
    return function(*args)
