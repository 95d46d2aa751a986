"""torch.distributed's module-level object that knows every process group, and the names that groups get.

`distributed_c10d` keeps all of its process groups in one object, ``_world``, of class ``_World``. PyTorch has no public
way to build a second set of groups beside the one in use, or to put one in place of another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

NAMES = (
    "torch.distributed.distributed_c10d._World",
    "torch.distributed.distributed_c10d._world",
    "torch.distributed.distributed_c10d._update_default_pg",
    "torch.distributed.distributed_c10d._unregister_process_group",
    "torch.distributed.distributed_c10d._hash_ranks_to_str",
)

WorldObject = c10d._World
"""The class of the module-level object: properties over the dicts that hold the groups."""


def world_object() -> Any:
    """The object that torch.distributed uses now."""
    return c10d._world


def replace_world_object(world: Any) -> None:
    """Have torch.distributed use `world`, an instance of a subclass of `WorldObject`."""
    c10d._world = world


def announce_default_group(group: dist.ProcessGroup | None) -> None:
    """Tell the parts of PyTorch that keep a reference of their own which group is the default one now."""
    c10d._update_default_pg(group)


def unregister(group_name: str) -> None:
    """Take a group out of the process-wide registry, which is in C++ and keyed by name."""
    c10d._unregister_process_group(c10d.GroupName(group_name))


def prefix_hashed_names(prefix: Callable[[], str]) -> None:
    """Have names that PyTorch derives from a group's ranks alone depend on ``prefix()`` too.

    ``new_group(..., use_local_synchronization=True)`` and `split_group` name a group by a hash of its ranks and of the
    number of groups in its world. Two worlds with the same ranks would name theirs alike, and the registry of names is
    one for the whole process.
    """
    original = c10d._hash_ranks_to_str

    def hashed(ranks: list[int]) -> str:
        return f"{prefix()}{original(ranks)}"

    c10d._hash_ranks_to_str = hashed
