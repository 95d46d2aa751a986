"""The buffers that a module itself has."""

from __future__ import annotations

import torch
from torch import nn

NAMES = ("torch.nn.Module._buffers", "torch.nn.Module._non_persistent_buffers_set")


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own dict of its own buffers, by name: without the walk that `named_buffers` takes."""
    return module._buffers


def names_of_lasting(model: nn.Module) -> set[str]:
    """The names, all that there are, of the parameters and of those buffers that a `state_dict` has."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for prefix, module in model.named_modules(remove_duplicate=False):
        lasting = module._buffers.keys() - module._non_persistent_buffers_set
        names |= {f"{prefix}.{name}" if prefix else name for name in lasting}
    return names
