"""Tensors viewed as plain integers, so that every dtype is copied alike and no value is ever interpreted."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from etc_agent.torch_private.tensors import copy_each

_BITS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""An integer dtype of each item size, which every backend can copy. The 16-byte one serves complex128 only."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name that `LogicalTensor.dtype` has: ``torch.float32`` is ``float32``."""
    return str(dtype).removeprefix("torch.")


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, shape and strides under an integer dtype of the same item size."""
    return tensor.detach().view(_BITS_OF_SIZE[tensor.element_size()])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of any shape as a flat uint8 view of ``tensor.nbytes`` elements."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def bits_at(buffer: torch.Tensor, start_bytes: int, shape: tuple[int, ...], itemsize: int) -> torch.Tensor:
    """The bytes of a flat uint8 `buffer` from `start_bytes`, which is aligned to the item size, as bits of `shape`."""
    return buffer[start_bytes : start_bytes + prod(shape) * itemsize].view(_BITS_OF_SIZE[itemsize]).view(shape)


def copy_bits(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source onto the target at its place, both as bits. One launch per group of like tensors on GPUs."""
    if targets:
        copy_each(targets, sources)


def finish_copies(device: torch.device) -> None:
    """Wait for what a device copies: the host is about to read it, or to use its memory again."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def touch(tensor: torch.Tensor) -> None:
    """Write to every page, so that page faults happen now and not while training stands still."""
    as_bytes(tensor).zero_()
