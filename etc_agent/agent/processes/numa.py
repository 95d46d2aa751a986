"""Binding a worker to the CPUs near its accelerator: torchrun's ``--numa-binding``.

torch binds by a process's position in its context. Since each worker has a context of its own here, the binding is done
by its slot instead.
"""

from __future__ import annotations

import shutil
from typing import Any

from torch.numa.binding import NumaOptions

from etc_agent.errors import EtcError
from etc_agent.torch_private.numa import bind_this_process, bound_command


def bound(path: str, args: tuple[Any, ...], slot: int, options: NumaOptions | None) -> tuple[str, tuple[Any, ...]]:
    """The command of a worker with binding to the CPUs near accelerator `slot`; unchanged where `options` is None.

    Raises:
        EtcError: the CPUs near that accelerator cannot be found, or there is no numactl to bind a program with.
    """
    if options is None:
        return path, args
    if shutil.which("numactl") is None and not options.should_fall_back_if_binding_fails:
        raise EtcError("--numa-binding needs the program numactl; install it (apt-get install numactl)")
    try:
        program, *rest = bound_command((path, *map(str, args)), slot, options)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        mode = options.affinity_mode.value
        raise EtcError(f"--numa-binding={mode}: no CPUs were found near accelerator {slot}: {reason}") from None
    return program, tuple(rest)


def bind_here(slot: int, options: NumaOptions | None) -> None:
    """Bind this process, which runs a function, to the CPUs near accelerator `slot`."""
    if options is not None:
        bind_this_process(slot, options)
