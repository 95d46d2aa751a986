"""The `keep` mode of a switch: the old state stays intact until the vote, so a failed change costs only time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from etc_agent.errors import EtcError
from etc_agent.integrations.aliases import Alias, aliases_of, local_tensor, view_of_owner
from etc_agent.integrations.native import TrainState, materialise
from etc_agent.integrations.tensors import all_tensors
from etc_agent.migration.keep import KeepingMigration
from etc_agent.migration.memory.binding import same_memory
from etc_agent.migration.memory.shared import SharedMemory
from etc_agent.planner.plan import MigrationPlan
from etc_agent.state.layout import Manifest, Shard
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
    """The tensors of the new generation by shard (DTensors as such), and those that are views of others."""

    tensors: Mapping[Shard, torch.Tensor]
    views: tuple[View, ...]

    @classmethod
    def of(cls, state: TrainState, manifest: Manifest) -> NewTensors:
        """The tensors of a state on the meta device, where tensors that share memory are meant to share it. The tensor
        objects stay the same when they get memory."""
        tensors = all_tensors(state)
        names = {id(tensor): name for name, tensor in tensors.items()}
        views = (View(name, names[id(alias.owner)], alias) for name, alias in aliases_of(tensors).items())
        in_manifest = {shard.tensor.name: shard for shard in manifest}
        found = {in_manifest[name]: tensor for name, tensor in tensors.items() if name in in_manifest}
        return cls(found, tuple(views))

    def local(self) -> dict[Shard, torch.Tensor]:
        """The local plain tensors."""
        return {shard: local_tensor(tensor) for shard, tensor in self.tensors.items()}


def allocate(
    following: LiveGeneration,
    manifest: Manifest,
    plan: MigrationPlan,
    worker: int,
    sources: Mapping[Shard, torch.Tensor],
    memory: SharedMemory | None,
    device: torch.device,
) -> NewTensors:
    """Give the new generation its memory: the old tensor's memory where the plan keeps a whole shard and the strides
    are those that build() gives, else new memory with all pages allocated.

    `memory`: the part that workers of this host can write to.
    """
    kept = {
        Shard(refer.tensor, refer.target_box): sources[Shard(refer.tensor, refer.source_box)]
        for refer in plan.refers
        if refer.worker == worker and refer.is_whole
    }
    shared = memory.tensors if memory is not None else {}

    def provide(shard: Shard, meta: torch.Tensor) -> torch.Tensor:
        # Gradients follow the strides, and replicas on other workers have the strides that build() gives.
        if shard in kept and kept[shard].stride() == meta.stride():
            return kept[shard]
        if shard in shared and meta.is_contiguous():
            return shared[shard]
        return torch.empty_like(meta, device=device).zero_()

    with entered(following.world):
        new = NewTensors.of(following.state, manifest)
        materialise(following.state, provide)
    check_views(new.views, {shard.tensor.name: tensor for shard, tensor in sources.items()})
    return new


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
        for shard, tensor in self._new.tensors.items():
            if not same_memory(local_tensor(tensor), targets[shard]):
                _put(tensor, targets[shard])
        for view in self._new.views:
            _put(view.alias.tensor, view_of_owner(view.alias, local_tensor(view.alias.owner)))

    def close(self) -> None:
        self.migration.close()
        self._new = None

    def account(self) -> str:
        return ""

    def refused(self, generation: int, attempt: Attempt) -> None:
        """Nothing to do: the old generation is intact."""


def _put(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Let a tensor, or a DTensor's local tensor, use the memory of a plain tensor."""
    local = local_part(tensor) if isinstance(tensor, DTensor) else tensor
    local.data = memory
