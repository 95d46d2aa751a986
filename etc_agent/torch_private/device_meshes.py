"""What a DeviceMesh refers to: the mesh that it was sliced from, and its process groups."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

NAMES = (
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh",
    "torch.distributed.device_mesh.DeviceMesh._pg_registry",
)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was sliced from; itself where it is whole."""
    return mesh._get_root_mesh()


def forget_groups(mesh: DeviceMesh) -> None:
    """Drop the references to process groups that a mesh keeps. Releases before 2.13 keep names alone."""
    registry = getattr(mesh, "_pg_registry", None)
    if registry is not None:
        registry.clear()
