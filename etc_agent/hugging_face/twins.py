"""Copies of a model that have its modules and names, and no values."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def meta_twin(model: nn.Module) -> nn.Module:
    """A copy of `model` with parameters and buffers on the meta device; tied ones stay tied. Hooks, modes, and which
    parameters are trained are `model`'s. `model` itself is not changed, and no memory for its values is taken."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)
