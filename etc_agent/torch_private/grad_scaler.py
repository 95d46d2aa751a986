"""Whether a gradient scaler has found non-finite gradients; `GradScaler` says so only after it has used the answer."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

NAMES = ("torch.amp.GradScaler._found_inf_per_device",)


def found_inf(scaler: Any, optimizer: Optimizer) -> list[torch.Tensor]:
    """One scalar tensor per device, 1 where a non-finite gradient was found; empty before ``unscale_``.

    They are the scaler's own tensors: its ``update`` reads what is written to them.
    """
    return list(scaler._found_inf_per_device(optimizer).values())
