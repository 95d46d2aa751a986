"""Makes device meshes of different worlds compare unequal, even where shapes and ranks agree."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from etc_agent.torch_private.device_meshes import root_mesh


def tell_meshes_apart() -> None:
    """Make meshes of two worlds unequal.

    torch compares meshes by shape and ranks. DTensor's caches, which each thread keeps (autograd's threads too) and
    which use meshes as keys, would otherwise return a mesh of an earlier generation, whose process groups are closed.
    """
    same_ranks = DeviceMesh.__eq__

    def same(mesh: DeviceMesh, other: object) -> bool:
        if mesh is other:
            return True
        return isinstance(other, DeviceMesh) and _number_of(mesh) == _number_of(other) and same_ranks(mesh, other)

    DeviceMesh.__eq__ = same  # type: ignore[method-assign]


def _number_of(mesh: DeviceMesh) -> int:
    return getattr(root_mesh(mesh), "etc_world", 0)
