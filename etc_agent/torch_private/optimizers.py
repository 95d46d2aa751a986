"""Hooks of an optimizer's step, which a copy of the optimizer would share with the original."""

from __future__ import annotations

from collections import OrderedDict

from torch.optim import Optimizer

NAMES = (
    "torch.optim.Optimizer._optimizer_step_pre_hooks",
    "torch.optim.Optimizer._optimizer_step_post_hooks",
)


def without_step_hooks(optimizer: Optimizer) -> None:
    """Give `optimizer` empty tables of step hooks of its own."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
