"""Holdings: what a worker holds of its generation's state, as the main thread found it at a safe point.

Live modules are read only by the main thread and only at a safe point: during a step, modules may hold other tensors
than their state (FSDP2 registers unsharded parameters from before forward to after backward). Code that runs beside
training is given this value instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from etc_agent.errors import EtcError
from etc_agent.integrations.aliases import local_tensor
from etc_agent.integrations.amendments import Amendments, changed_plain_numbers
from etc_agent.integrations.native import TrainState
from etc_agent.integrations.parameter_values import has_parameter_values
from etc_agent.integrations.tensors import all_tensors, shard_of
from etc_agent.state.layout import LogicalTensor, Shard
from etc_agent.worker.change.state.rescued import NOTHING, Rescued

_MOST_NAMES = 5


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """`tensors`: every tensor of the state, including views of other tensors: this worker's shard of it -> the local
    plain tensor, which shares the live tensor's storage and is detached from autograd. `amendments`: what the script
    has changed since `build`. `changed_numbers`: plain numeric attributes that have changed, with old and new value.
    `has_values`: whether the optimizer keeps Python values for some parameters. `rescued`: what this worker gives in
    place of workers that were lost."""

    tensors: Mapping[Shard, torch.Tensor]
    amendments: Amendments
    changed_numbers: Mapping[str, tuple[float | None, float]]
    has_values: bool
    rescued: Rescued = NOTHING

    @classmethod
    def of(cls, state: TrainState) -> Holdings:
        """Take down `state` as it is now. Call it on the main thread, at a safe point.

        Raises:
            EtcError: the state contains something that cannot be moved; the message names it.
        """
        reshard(state)
        tensors = local_shards(all_tensors(state))
        return cls(tensors, Amendments.of(state), changed_plain_numbers(state), has_parameter_values(state))

    def check_same_shards(self, now: Holdings) -> None:
        """Check that `now`, taken later, has the same shards, so that a plan made for the first is valid for the
        second.

        Raises:
            EtcError: tensors were added, removed, or have another shape, dtype or sharding; the message names them.
        """
        if self.tensors.keys() != now.tensors.keys():
            changed = dict.fromkeys(shard.tensor.name for shard in self.tensors.keys() ^ now.tensors.keys())
            names = sorted(changed)
            others = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            raise EtcError(
                f"{', '.join(names[:_MOST_NAMES])}{others}: added, removed, or of another shape, dtype or sharding "
                "since the change was prepared; it has to be prepared again"
            )


def reshard(state: TrainState) -> None:
    """Reshard FSDP2 modules, so that they hold their state only. FSDP2 leaves the outermost modules unsharded after a
    forward pass without backward, such as an evaluation between two steps."""
    for module in state.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_shards(tensors: Mapping[str, torch.Tensor]) -> dict[Shard, torch.Tensor]:
    """This worker's shard of each named tensor -> the local plain tensor, as in `Holdings`."""
    alike: dict[tuple[Any, ...], Shard] = {}
    return {_shard_of(name, tensor, alike): local_tensor(tensor) for name, tensor in tensors.items()}


def _shard_of(name: str, tensor: torch.Tensor, alike: dict[tuple[Any, ...], Shard]) -> Shard:
    """As `shard_of`, but computes the box once for all tensors that are `alike`, because training stands still."""
    placed = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    key = (tensor.shape, tensor.dtype, local_tensor(tensor).shape, placed)
    first = alike.get(key)
    if first is None:
        first = alike[key] = shard_of(name, tensor)
    known = first.tensor
    return Shard(LogicalTensor(name, known.shape, known.dtype, known.itemsize), first.box)
