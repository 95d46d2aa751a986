"""DTensor's caches, which know nothing of worlds: kept apart by mesh, and emptied when a world goes."""

from __future__ import annotations

import sys

import torch
from torch.distributed.device_mesh import DeviceMesh


def tell_meshes_apart() -> None:
    """Make meshes of two worlds unequal.

    For torch two meshes are equal where their shapes and ranks are. DTensor's caches, kept by each thread (autograd's
    too) and keyed by meshes, would then answer with a mesh of an earlier generation, and so with groups that are gone.
    """
    same_ranks = DeviceMesh.__eq__

    def same(mesh: DeviceMesh, other: object) -> bool:
        if mesh is other:
            return True
        return isinstance(other, DeviceMesh) and _number_of(mesh) == _number_of(other) and same_ranks(mesh, other)

    DeviceMesh.__eq__ = same  # type: ignore[method-assign]


def _number_of(mesh: DeviceMesh) -> int:
    return getattr(mesh._get_root_mesh(), "etc_world", 0)


def clear_dtensor_caches() -> None:
    """Empty the calling thread's caches of DTensor, as far as the module is loaded and has them."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    for cached in (propagator.propagate_op_sharding, getattr(propagator, "propagate_tensor_meta", None)):
        clear = getattr(cached, "cache_clear", None)
        if clear is not None:
            clear()
    for name in ("_clear_DTensor_sharding_propagator_cache",):
        clear = getattr(torch._C, name, None)
        if clear is not None:
            clear()
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    for value in vars(redistribute).values() if redistribute else ():
        clear = getattr(value, "cache_clear", None)
        if clear is not None:
            clear()
