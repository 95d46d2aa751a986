"""One operation over many tensors in few kernels. PyTorch documents these functions under private names."""

from __future__ import annotations

import torch

NAMES = ("torch._foreach_mul_", "torch._foreach_norm")


def norms(tensors: list[torch.Tensor], order: float) -> list[torch.Tensor]:
    """The vector norm of each of `tensors`, which are on one device and of one dtype."""
    return list(torch._foreach_norm(tensors, order))


def multiply(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each of `tensors`, which are on one device and of one dtype, in place."""
    torch._foreach_mul_(tensors, factor)
