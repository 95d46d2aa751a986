"""Meshes of two worlds are unequal, although they may have the same shape and ranks."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from etc_agent.torch_private.device_meshes import root_mesh


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
    return getattr(root_mesh(mesh), "etc_world", 0)
