"""Worlds: complete sets of c10d process groups, of which another one can be activated and the old one closed.

torch.distributed keeps its process groups in one module-level object (`torch_private.c10d_world`). Here that object is
replaced by one whose contents depend on the thread. A background thread *enters* a new world and builds its default
group, axis groups and device mesh there (`build`), while every other thread continues in the active world. The main
thread *activates* the new world at a safe point.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from etc_agent.errors import EtcError
from etc_agent.parallel.config import ParallelConfig
from etc_agent.torch_private import c10d_world
from etc_agent.torch_private.backends import abort_device_backend
from etc_agent.torch_private.device_meshes import forget_groups
from etc_agent.torch_private.dtensor_caches import clear_caches_of_this_thread
from etc_agent.worker.world.connections import Connections
from etc_agent.worker.world.meshes import tell_meshes_apart

_CONTENTS: Final[dict[str, Callable[[], Any]]] = {
    "default_pg": lambda: None,
    "pg_map": dict,
    "pg_names": dict,
    "pg_group_ranks": dict,
    "pg_backend_config": dict,
    "group_count": int,
    "tags_to_pg": dict,
    "pg_to_tag": dict,
    "pg_coalesce_state": dict,
    "comms": list,
}


class Contents:
    """What c10d stores about one world, the connections of its gloo groups, and the meshes that were made in it."""

    default_pg: dist.ProcessGroup | None
    pg_names: dict[dist.ProcessGroup, str]

    def __init__(self, first_group: int = 0, connections: Connections | None = None) -> None:
        for name, empty in _CONTENTS.items():
            setattr(self, name, empty())
        self.connections = connections or Connections()
        self.group_count = self.first_group = first_group
        self.meshes: list[weakref.ref[DeviceMesh]] = []


class _SwappableWorld(c10d_world.WorldObject):
    """c10d's world object with contents per thread: the world that the thread has entered, else the active one."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["active"] = Contents()
        self.__dict__["entered"] = threading.local()

    @property
    def contents(self) -> Contents:
        return getattr(self.__dict__["entered"], "contents", None) or self.__dict__["active"]


def _delegate(name: str) -> property:
    def get(world: _SwappableWorld) -> Any:
        return getattr(world.contents, name)

    def put(world: _SwappableWorld, value: Any) -> None:
        setattr(world.contents, name, value)

    return property(get, put)


for _name in _CONTENTS:
    setattr(_SwappableWorld, _name, _delegate(_name))


@dataclass(slots=True)
class World:
    """One generation's process groups: the default group, one group per axis, and the meshes over them."""

    config: ParallelConfig
    rank: int
    mesh: DeviceMesh
    expert_mesh: DeviceMesh
    contents: Contents
    excepthook: Callable[..., Any]
    groups: list[dist.ProcessGroup] = field(default_factory=list)

    def cut(self) -> None:
        """Have every operation of this world's groups fail, from any thread: the connections of gloo are cut, and
        device backends (NCCL, which has never been run this way) are aborted."""
        self.contents.connections.cut()
        for group in list(self.contents.pg_names):
            abort_device_backend(group)

    def close(self) -> None:
        """Shut down every group of this world, including groups that user code made in it. Safe to call twice.

        Sockets and threads end with the last reference to a group. Those of the meshes are dropped here.
        """
        close_groups(self.contents)
        self.groups.clear()
        for known in self.contents.meshes:
            if (mesh := known()) is not None:
                forget_groups(mesh)
        self.contents.meshes.clear()


original_excepthook = sys.excepthook


def install() -> None:
    """Replace c10d's module-level object in this process.

    Raises:
        EtcError: a default process group exists already.
    """
    if isinstance(c10d_world.world_object(), _SwappableWorld):
        if dist.is_initialized():
            raise EtcError("a session is open in this process already; close it before opening another")
        return
    if dist.is_initialized():
        raise EtcError(
            "init_process_group was called before etc.session(); remove it, the session makes the process groups"
        )
    world = _SwappableWorld()
    c10d_world.replace_world_object(world)
    c10d_world.prefix_hashed_names(lambda: f"{world.contents.first_group}_")
    tell_meshes_apart(
        lambda: world.contents.first_group, lambda mesh: world.contents.meshes.append(weakref.ref(mesh))
    )
    dist.init_process_group = c10d.init_process_group = _explaining(c10d.init_process_group)  # type: ignore[assignment]


def _explaining(init_process_group: Callable[..., None]) -> Callable[..., None]:
    """`init_process_group`, except that inside a session its error message says what to do about it."""

    @functools.wraps(init_process_group)
    def explaining(*args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            raise EtcError(
                "init_process_group was called inside etc.session(); remove it, the session has made the process groups"
            )
        init_process_group(*args, **kwargs)

    return explaining


def _swappable() -> _SwappableWorld:
    world = c10d_world.world_object()
    assert isinstance(world, _SwappableWorld), "worlds are not installed"
    return world


def present_connections() -> Connections:
    """Where the groups note their connections that the calling thread makes."""
    return _swappable().contents.connections


@contextmanager
def entered_contents(contents: Contents) -> Iterator[None]:
    local = _swappable().__dict__["entered"]
    before = getattr(local, "contents", None)
    local.contents = contents
    try:
        yield
    finally:
        local.contents = before


@contextmanager
def entered(world: World) -> Iterator[None]:
    """Within the context, in this thread only, torch.distributed uses `world`."""
    with entered_contents(world.contents):
        yield


def close_groups(contents: Contents) -> None:
    """Shut down every group of `contents`, and leave it empty."""
    with entered_contents(contents):
        names = dict(contents.pg_names)
        for group in sorted(names, key=lambda each: names[each], reverse=True):
            group.shutdown()
            c10d_world.unregister(names[group])
    for name, empty in _CONTENTS.items():
        setattr(contents, name, empty())


def activate(world: World) -> None:
    """From now on torch.distributed uses `world`, in every thread that has not entered another one.

    Clears the calling thread's DTensor caches: their entries refer to meshes that are not used again.
    """
    _swappable().__dict__["active"] = world.contents
    c10d_world.announce_default_group(world.contents.default_pg)
    sys.excepthook = world.excepthook
    clear_caches_of_this_thread()


def deactivate() -> None:
    """Leave no world active."""
    _swappable().__dict__["active"] = Contents()
    sys.excepthook = original_excepthook
    clear_caches_of_this_thread()
