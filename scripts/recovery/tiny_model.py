"""A model so small that a recovery's time is that of the machinery alone; the same for all contenders."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import nn

WIDTH = 64
GLOBAL_BATCH = 12
"""Samples of a step: 2, 3 and 4 workers divide it."""
COMPUTING_S = 0.02
"""What a step would take on a device, beside which the CPU is idle."""


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def samples(ids: Iterable[int]) -> torch.Tensor:
    """(samples, WIDTH) float32."""
    return torch.stack([torch.sin(torch.arange(WIDTH) * (index % 97 + 1) * 0.1) for index in ids])


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    time.sleep(COMPUTING_S)
    loss: torch.Tensor = ((model(batch) - torch.cos(batch)) ** 2).mean()
    return loss
