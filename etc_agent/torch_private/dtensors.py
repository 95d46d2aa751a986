"""What a DTensor has on this rank, without the autograd functions around its public names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

NAMES = (
    "torch.distributed.tensor._utils",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
    "torch.distributed.tensor.DTensor._local_tensor",
)


def local_part(tensor: DTensor) -> torch.Tensor:
    """The plain tensor of this rank. ``to_local`` would make a view of it that takes part in autograd."""
    return tensor._local_tensor


def local_shape_and_offset(
    shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The box of a tensor of the whole `shape` that falls to this rank: its shape, and its first corner."""
    local_shape, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(local_shape), tuple(offset)
