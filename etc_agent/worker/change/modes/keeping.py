"""The `keep` mode of a switch: the old state stays intact until the vote, so a failed change costs only time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from etc_agent.adapters.choose import adapter_of
from etc_agent.errors import EtcError
from etc_agent.integrations.aliases import Alias, aliases_of, local_tensor, view_of_owner
from etc_agent.integrations.tensors import Placed
from etc_agent.integrations.train_state import TrainState
from etc_agent.migration.keep import KeepingMigration
from etc_agent.migration.memory.binding import same_memory
from etc_agent.migration.memory.bits import as_bits, copy_bits
from etc_agent.migration.memory.shared import SharedMemory
from etc_agent.planner.transfers.plan import MigrationPlan
from etc_agent.state.layout import Shard
from etc_agent.torch_private.dtensors import local_part
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.world.swap import entered

if TYPE_CHECKING:
    from etc_agent.worker.change.attempt import Attempt


@dataclass(frozen=True, slots=True)
class View:
    """A tensor `name` of the new generation that is a view of another one, `owner_name`."""

    name: str
    owner_name: str
    alias: Alias


@dataclass(frozen=True, slots=True)
class NewTensors:
    """What the new generation holds. `boxes`: its shards -> parts of its local tensors. `places`: the tensors that the
    session gives memory to, views of others apart, and `views` those; both empty if the adapter has given memory."""

    boxes: Mapping[Shard, torch.Tensor]
    places: tuple[Placed, ...]
    views: tuple[View, ...]

    @classmethod
    def of(cls, state: TrainState) -> NewTensors:
        """The tensors of a state on the meta device, where tensors that share memory are meant to share it. The tensor
        objects stay the same when they get memory."""
        adapter = adapter_of(state)
        places = adapter.places(state)
        names = {id(placed.tensor): name for name, placed in places.items()}
        aliases = aliases_of({name: placed.tensor for name, placed in places.items()})
        views = tuple(View(name, names[id(alias.owner)], alias) for name, alias in aliases.items())
        own = tuple(placed for name, placed in places.items() if name not in aliases)
        return cls(adapter.shards(state), own, views)

    def with_memory(self, state: TrainState) -> NewTensors:
        return replace(self, boxes=adapter_of(state).shards(state))


def allocate(
    following: LiveGeneration,
    plan: MigrationPlan,
    worker: int,
    sources: Mapping[Shard, torch.Tensor],
    memory: SharedMemory | None,
    device: torch.device,
) -> NewTensors:
    """Give the new generation its memory: the old tensor's memory where the plan keeps all of a tensor and the strides
    are those that build() gives, else new memory with all pages allocated.

    `memory`: the part that workers of this host can write to.
    """
    kept = {
        Shard(refer.tensor, refer.target_box): sources[Shard(refer.tensor, refer.source_box)]
        for refer in plan.refers
        if refer.worker == worker and refer.is_whole
    }
    shared = memory.tensors if memory is not None else {}

    def provide(placed: Placed, meta: torch.Tensor) -> torch.Tensor:
        # Gradients follow the strides, and replicas on other workers have the strides that build() gives.
        old = around(placed, meta, kept)
        if old is not None:
            return old
        if placed.is_one_box and placed.shard in shared and meta.is_contiguous():
            return shared[placed.shard]
        return torch.empty_like(meta, device=device).zero_()

    with entered(following.world):
        new = NewTensors.of(following.state)
        adapter_of(following.state).materialise(following.state, provide)
        new = new.with_memory(following.state)
    check_views(new.views, {shard.tensor.name: tensor for shard, tensor in sources.items()})
    return new


def around(placed: Placed, like: torch.Tensor, boxes: Mapping[Shard, torch.Tensor]) -> torch.Tensor | None:
    """The local tensor of the shape and strides of `like` in which all of `placed`'s boxes lie where its pieces say, if
    `boxes` are parts of one such tensor, and fill it."""
    if not placed.shards or any(shard not in boxes for shard in placed.shards):
        return None
    first = boxes[placed.shards[0]]
    if placed.is_one_box:
        return first if first.stride() == like.stride() else None
    if not placed.pieces or sum(shard.box.num_elements for shard in placed.shards) != like.numel():
        return None
    start = first.storage_offset() - placed.views(like)[placed.shards[0]].storage_offset() + like.storage_offset()
    if start < 0 or (start + like.numel()) * first.element_size() > first.untyped_storage().nbytes():
        return None
    candidate = torch.empty(0, dtype=first.dtype, device=first.device)
    candidate.set_(first.untyped_storage(), start, like.shape, like.stride())
    views = placed.views(candidate)
    return candidate if all(same_memory(views[shard], boxes[shard]) for shard in placed.shards) else None


def check_views(views: tuple[View, ...], live: Mapping[str, torch.Tensor]) -> None:
    """Check that a tensor which is a view of another one in the new generation is a view in the old one, too.

    Args:
        live: the old local tensors by name.

    Raises:
        EtcError: one has memory, and so values, of its own.
    """
    for view in views:
        tensor, owner = live.get(view.name), live.get(view.owner_name)
        if tensor is None or owner is None or not tensor.numel():
            continue
        if tensor.shape != local_tensor(view.alias.tensor).shape or owner.shape != local_tensor(view.alias.owner).shape:
            continue
        if not owner.is_contiguous() or not same_memory(tensor, view_of_owner(view.alias, owner)):
            raise EtcError(
                f"{view.name} is a view of {view.owner_name} where build() makes it, but has memory of its own now; "
                "write to it in place (copy_) instead of giving it other memory, or build it as a tensor of its own"
            )


class Keeping:
    """The mode `keep`. `new` is None on a worker that leaves."""

    def __init__(self, migration: KeepingMigration, new: NewTensors | None) -> None:
        self.migration = migration
        self._new = new
        self._has_rebound = False

    def refresh(self, sources: Mapping[Shard, torch.Tensor]) -> frozenset[Shard]:
        rebound = self.migration.refresh(sources)
        if rebound:
            self._has_rebound = True
            if self._new is not None:
                check_views(self._new.views, {shard.tensor.name: tensor for shard, tensor in sources.items()})
        return rebound

    def begin(self, attempt: Attempt) -> bool:
        """No vote before the migration. A worker that has a problem cuts its connections, since the others wait for
        it."""
        attempt.cut_if_alone()
        return True

    def take_over(self) -> None:
        """Where an old tensor that stays has got other memory since the preparation, the new tensor uses that
        memory."""
        if self._new is None or not self._has_rebound:
            return
        targets = self.migration.targets
        for placed in self._new.places:
            local = local_tensor(placed.tensor)
            views = placed.views(local)
            if all(same_memory(views[shard], targets[shard]) for shard in placed.shards):
                continue
            memory = around(placed, local, targets)
            _put(placed.tensor, memory if memory is not None else _gathered(placed, local, targets))
        for view in self._new.views:
            _put(view.alias.tensor, view_of_owner(view.alias, local_tensor(view.alias.owner)))

    def close(self) -> None:
        self.migration.close()
        self._new = None

    def account(self) -> str:
        return ""

    def refused(self, generation: int, attempt: Attempt) -> None:
        """Nothing to do: the old generation is intact."""


def _gathered(placed: Placed, like: torch.Tensor, boxes: Mapping[Shard, torch.Tensor]) -> torch.Tensor:
    """`boxes` in one new tensor."""
    local = torch.empty_like(like)
    for shard, view in placed.views(local).items():
        copy_bits((as_bits(view),), (as_bits(boxes[shard]),))
    return local


def _put(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Let a tensor, or a DTensor's local tensor, use the memory of a plain tensor."""
    local = local_part(tensor) if isinstance(tensor, DTensor) else tensor
    local.data = memory
