"""The buffers that a module itself has."""

from __future__ import annotations

import torch
from torch import nn

NAMES = ("torch.nn.Module._buffers",)


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own dict of its own buffers, by name: without the walk that `named_buffers` takes."""
    return module._buffers
