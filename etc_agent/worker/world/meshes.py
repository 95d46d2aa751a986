"""Device meshes of different worlds: unequal, even where shapes and ranks agree, and known to their world."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from etc_agent.torch_private.device_meshes import root_mesh


def tell_meshes_apart(number: Callable[[], int], note: Callable[[DeviceMesh], None]) -> None:
    """Make meshes of two worlds unequal, those that a script makes with ``init_device_mesh`` too.

    torch compares meshes by shape and ranks. DTensor's caches, which each thread keeps (autograd's threads too) and
    which use meshes as keys, would otherwise return a mesh of an earlier generation, whose process groups are closed.

    `number`: of the world that the calling thread is in. `note`: called with each mesh that is made in it.
    """
    make, same_ranks = DeviceMesh.__init__, DeviceMesh.__eq__

    @functools.wraps(make)
    def numbered(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        make(mesh, *args, **kwargs)
        mesh.etc_world = number()  # type: ignore[attr-defined]
        note(mesh)

    def same(mesh: DeviceMesh, other: object) -> bool:
        if mesh is other:
            return True
        return isinstance(other, DeviceMesh) and _number_of(mesh) == _number_of(other) and same_ranks(mesh, other)

    DeviceMesh.__init__ = numbered  # type: ignore[assignment,method-assign]
    DeviceMesh.__eq__ = same  # type: ignore[method-assign]


def _number_of(mesh: DeviceMesh) -> int:
    return getattr(root_mesh(mesh), "etc_world", 0)
