"""DTensor's caches of how operations on sharded tensors are carried out. They have no public way to be emptied.

They are kept by each thread, autograd's threads included, and hold on to device meshes.
"""

from __future__ import annotations

import sys

import torch

NAMES = (
    "torch._C",
    "torch._C._clear_DTensor_sharding_propagator_cache",
    "torch.distributed.tensor.DTensor._op_dispatcher",
    "torch.distributed.tensor._redistribute",
)


def clear_caches_of_this_thread() -> None:
    """Empty the calling thread's caches, as far as DTensor is loaded."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    _clear(propagator.propagate_op_sharding)
    _clear(getattr(propagator, "propagate_tensor_meta", None))
    torch._C._clear_DTensor_sharding_propagator_cache()
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    for value in vars(redistribute).values() if redistribute else ():
        _clear(value)


def _clear(cached: object) -> None:
    clear = getattr(cached, "cache_clear", None)
    if clear is not None:
        clear()
