"""Binding to the CPUs near an accelerator, which PyTorch itself does by the position of a process in its context."""

from __future__ import annotations

from collections.abc import Sequence

from torch.numa.binding import (
    NumaOptions,
    _maybe_apply_numa_binding_to_current_process,
    _maybe_wrap_command_args_with_numa_binding,
)

NAMES = (
    "torch.numa.binding._maybe_apply_numa_binding_to_current_process",
    "torch.numa.binding._maybe_wrap_command_args_with_numa_binding",
)


def bound_command(command: Sequence[str], accelerator: int, options: NumaOptions) -> Sequence[str]:
    """A program and its arguments, such that it runs near an accelerator."""
    return _maybe_wrap_command_args_with_numa_binding(tuple(command), gpu_index=accelerator, numa_options=options)


def bind_this_process(accelerator: int, options: NumaOptions) -> None:
    """Run near an accelerator from now on."""
    _maybe_apply_numa_binding_to_current_process(gpu_index=accelerator, numa_options=options)
