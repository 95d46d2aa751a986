"""Gradients after backward: summed over dp in buckets, and clipped by their global norm."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from etc_agent.worker.context import ParallelContext

BUCKET_BYTES = 8 << 20


def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    """The local parts of all gradients, in the order of the model's parameters; writing to them changes ``.grad``."""
    return [_local(param.grad) for param in model.parameters() if param.grad is not None]


@torch.no_grad()
def sum_over_dp(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum each tensor over `group`, in place. Buckets depend on sizes alone: every run adds in the same order."""
    bucket: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        bucket.append(tensor)
        num_bytes += tensor.nbytes
        if num_bytes >= BUCKET_BYTES:
            _sum_bucket(bucket, group)
            bucket, num_bytes = [], 0
    if bucket:
        _sum_bucket(bucket, group)


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float, parallel: ParallelContext) -> torch.Tensor:
    """Scale all gradients so that their norm over the whole model is at most `max_norm`. Returns the norm before.

    A parameter that is whole on every tp rank counts once.
    """
    counts_replicas = parallel.coordinate.tp == 0
    squares = torch.zeros((), device=parallel.device)
    for param in model.parameters():
        if param.grad is not None and (isinstance(param.grad, DTensor) or counts_replicas):
            squares += _local(param.grad).square().sum()
    for axis in ("tp", "pp"):
        if getattr(parallel.config, axis) > 1:
            dist.all_reduce(squares, group=parallel.mesh[axis].get_group())
    norm = squares.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in local_gradients(model):
        gradient.mul_(scale)
    return norm


def _local(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _sum_bucket(bucket: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([tensor.flatten() for tensor in bucket])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))
