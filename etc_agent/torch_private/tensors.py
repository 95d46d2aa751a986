"""Operations on tensors that only PyTorch's own optimizers and containers use, and storages' identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

NAMES = (
    "torch.Tensor._make_subclass",
    "torch._foreach_copy_",
    "torch.UntypedStorage._cdata",
    "torch.Tensor._version",
)


def make_subclass(kind: type[Any], tensor: torch.Tensor, requires_grad: bool) -> Any:
    """`tensor`'s data as an instance of `kind`, a subclass of Tensor."""
    return torch.Tensor._make_subclass(kind, tensor, requires_grad)


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source onto the target at its place, without waiting. One kernel per group of like tensors on GPUs."""
    torch._foreach_copy_(list(targets), list(sources), non_blocking=True)


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two tensors share as long as both are alive and have one storage; also where it is empty."""
    return number_of(tensor.untyped_storage())


def number_of(storage: torch.UntypedStorage) -> int:
    """A number that no other storage has as long as this one is alive."""
    return storage._cdata


def num_writes(tensor: torch.Tensor) -> int:
    """How often the tensor, or a view of it, was written in place: the counter by which autograd finds stale values."""
    return tensor._version
