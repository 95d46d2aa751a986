"""Hugging Face's accelerate: its process-wide state belongs to one generation.

`AcceleratorState`, `PartialState` and `GradientState` are singletons that keep rank, size and device from their first
use on. They are emptied before a generation is activated, so that an `Accelerator` which the script makes there finds
the process groups of the session, and neither starts nor keeps any of its own.
"""

from __future__ import annotations

import sys
from typing import Final

import torch.distributed as dist

from etc_agent.errors import EtcError

NAMES: Final = (
    "accelerate.state.AcceleratorState._reset_state",
    "accelerate.state.GradientState._reset_state",
    "accelerate.state.PartialState._shared_state",
)
"""What is used here beyond the documented interface; a test checks that it exists."""


def forget_earlier_generation() -> None:
    """Empty the singletons. Does nothing where the script has not imported accelerate."""
    state = sys.modules.get("accelerate.state")
    if state is None:
        return
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


def check_generation() -> None:
    """Check that an `Accelerator` which the script has made counts the ranks of the generation in force.

    Raises:
        EtcError: it counts others; gradients would not be averaged.
    """
    state = sys.modules.get("accelerate.state")
    num_processes = state.PartialState._shared_state.get("num_processes") if state is not None else None
    if num_processes not in (None, dist.get_world_size()):
        raise EtcError(
            f"accelerate counts {num_processes} process where the generation has {dist.get_world_size()}; make the "
            "Accelerator in activate, and on CPUs say so: Accelerator(cpu=True), TrainingArguments(use_cpu=True)"
        )
