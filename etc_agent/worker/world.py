"""Whole c10d worlds that can be built beside the one in use, put in its place, and destroyed later.

torch.distributed keeps its process groups in one module-level object, `distributed_c10d._world`. Here that object is
replaced by one whose contents depend on the thread: a background thread *enters* a world of its own and builds a
default group, axis groups and a device mesh in it, while every other thread goes on in the active one; the main
thread *activates* the new world at a safe point. This module is the only one that touches c10d's private names
(torch 2.11 to 2.13).

Two facts shape it. Group names are process-global in C++, so every world numbers its groups from an offset of its own,
the same on all its ranks. One TCPStore client is a mutex around one socket, so no two threads may share a client.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from etc_agent.errors import EtcError
from etc_agent.parallel.config import ParallelConfig

AXES: Final = ("pp", "dp", "tp")
"""The mesh's axes, slowest first, so that mesh ranks are virtual ranks."""

_GROUPS_PER_WORLD: Final = 1_000_000
_FIRST_FAKE_WORLD: Final = 1_000_000
_fake_numbers = itertools.count(_FIRST_FAKE_WORLD)

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


class _Contents:
    """What c10d knows of one world."""

    default_pg: dist.ProcessGroup | None
    pg_names: dict[dist.ProcessGroup, str]

    def __init__(self, first_group: int = 0) -> None:
        for name, empty in _CONTENTS.items():
            setattr(self, name, empty())
        self.group_count = first_group


class _SwappableWorld(c10d._World):
    """c10d's world object with per-thread contents: those that the thread entered, else the active ones."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["active"] = _Contents()
        self.__dict__["entered"] = threading.local()

    @property
    def contents(self) -> _Contents:
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
    """One generation's process groups: the default group, one group per axis, and the mesh over them."""

    config: ParallelConfig
    rank: int
    mesh: DeviceMesh
    contents: _Contents
    excepthook: Callable[..., Any]
    groups: list[dist.ProcessGroup] = field(default_factory=list)

    def close(self) -> None:
        """Shut down every group of this world, also those that user code made in it. Safe to call twice.

        Sockets and threads go when the last reference to a group does; the mesh's are dropped here.
        """
        with entered(self):
            names = dict(self.contents.pg_names)
            for group in sorted(names, key=lambda each: names[each], reverse=True):
                group.shutdown()
                c10d._unregister_process_group(c10d.GroupName(names[group]))
        for name, empty in _CONTENTS.items():
            setattr(self.contents, name, empty())
        self.groups.clear()
        registry = getattr(self.mesh, "_pg_registry", None)
        if registry is not None:
            registry.clear()


def install() -> None:
    """Make worlds swappable in this process.

    Raises:
        EtcError: a default process group exists already.
    """
    if isinstance(c10d._world, _SwappableWorld):
        if dist.is_initialized():
            raise EtcError("a session is open in this process already; close it before opening another")
        return
    if dist.is_initialized():
        raise EtcError(
            "init_process_group was called before etc.session(); remove it, the session makes the process groups"
        )
    c10d._world = _SwappableWorld()
    _tell_meshes_apart()
    dist.init_process_group = c10d.init_process_group = _explaining(c10d.init_process_group)  # type: ignore[assignment]


def _explaining(init_process_group: Callable[..., None]) -> Callable[..., None]:
    """torch's function, which inside a session would only say that it was called twice."""

    @functools.wraps(init_process_group)
    def explaining(*args: Any, **kwargs: Any) -> None:
        if dist.is_initialized():
            raise EtcError(
                "init_process_group was called inside etc.session(); remove it, the session has made the process groups"
            )
        init_process_group(*args, **kwargs)

    return explaining


def _tell_meshes_apart() -> None:
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


def _swappable() -> _SwappableWorld:
    assert isinstance(c10d._world, _SwappableWorld), "worlds are not installed"
    return c10d._world


@contextmanager
def _entered(contents: _Contents) -> Iterator[None]:
    local = _swappable().__dict__["entered"]
    before = getattr(local, "contents", None)
    local.contents = contents
    try:
        yield
    finally:
        local.contents = before


@contextmanager
def entered(world: World) -> Iterator[None]:
    """In this thread alone, torch.distributed means `world`."""
    with _entered(world.contents):
        yield


def activate(world: World) -> None:
    """From now on torch.distributed means `world`, in every thread that has not entered another.

    The calling thread's caches of DTensor are emptied: what they know is of meshes that do not come back.
    """
    _swappable().__dict__["active"] = world.contents
    c10d._update_default_pg(world.contents.default_pg)
    sys.excepthook = world.excepthook
    clear_dtensor_caches()


def deactivate() -> None:
    """Leave no world active."""
    _swappable().__dict__["active"] = _Contents()
    sys.excepthook = _original_excepthook
    clear_dtensor_caches()


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


def build(
    store: dist.Store, rank: int, config: ParallelConfig, number: int, device: torch.device, timeout_s: float
) -> World:
    """Build the world of generation `number` in the calling thread, beside whatever world is active.

    Collective over the ranks of `config`; `store` is the generation's own, and this thread's alone. Every group gets
    `timeout_s`, and is used once so that its connections stand.

    Raises:
        dist.DistError, RuntimeError: a rank did not come in time.
    """
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    world = _build(store, rank, config, number, backend, device, timedelta(seconds=timeout_s))
    with entered(world):
        for group in world.groups:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    return world


def build_fake(rank: int, config: ParallelConfig, device: torch.device) -> World:
    """A world without peers, for building `rank`'s part of a model under `config` on meta. Nothing communicates."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return _build(FakeStore(), rank, config, next(_fake_numbers), "fake", device, timedelta(seconds=1))


_original_excepthook = sys.excepthook
_building = threading.Lock()


def _build(
    store: dist.Store,
    rank: int,
    config: ParallelConfig,
    number: int,
    backend: str,
    device: torch.device,
    timeout: timedelta,
) -> World:
    contents = _Contents(first_group=number * _GROUPS_PER_WORLD)
    with _entered(contents):
        excepthook = _init_default_group(store, rank, config.num_ranks, backend, timeout)
        everyone = dist.group.WORLD
        assert everyone is not None
        groups = [everyone]
        axes = []
        ranks = torch.arange(config.num_ranks, dtype=torch.int, device="cpu").reshape(config.pp, config.dp, config.tp)
        for index in range(len(AXES)):
            axis = _axis_group(ranks.movedim(index, -1), rank, everyone, timeout)
            axes.append(axis)
            if axis is not everyone:
                groups.append(axis)
        mesh = DeviceMesh.from_group(axes, device.type, mesh=ranks, mesh_dim_names=AXES)
        mesh.etc_world = number  # type: ignore[attr-defined]
    return World(config, rank, mesh, contents, excepthook, groups)


def _init_default_group(
    store: dist.Store, rank: int, size: int, backend: str, timeout: timedelta
) -> Callable[..., Any]:
    """Make the entered world's default group; return the exception hook that goes with it.

    torch wraps the present hook at every call, to write ``[rank0]`` before tracebacks. Worlds are made again and
    again, so each wraps the process's own hook and is put in force with its world.
    """
    with _building:
        present = sys.excepthook
        sys.excepthook = _original_excepthook
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
            return sys.excepthook
        finally:
            sys.excepthook = present


def _axis_group(
    lines: torch.Tensor, rank: int, everyone: dist.ProcessGroup, timeout: timedelta
) -> dist.ProcessGroup:
    """The group along one axis that `rank` is in. `lines`: virtual ranks, that axis last. Every rank makes all."""
    rows = lines.reshape(-1, lines.shape[-1]).tolist()
    if len(rows) == 1:
        return everyone
    mine = None
    for row in rows:
        group = dist.new_group(row, timeout=timeout)
        if rank in row:
            mine = group
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def raw_group(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.ProcessGroup:
    """A gloo group outside every world, over CPU memory: for votes and migrations. Collective over its ranks.

    It is a backend; of a process group it has the collectives and send and recv, but no name and no place in a world.
    """
    return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s)))


def connect_store(address: str, timeout_s: float) -> dist.TCPStore:
    """A client of its own of the TCPStore at ``host:port``.

    Raises:
        EtcError: nobody answers there.
    """
    host, _, port = address.rpartition(":")
    try:
        return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
    except (dist.DistError, RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EtcError(f"the store at {address} does not answer within {timeout_s:g} s: {first}") from None
