"""Weights from one model into another, each sharded in its own way, while both live."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from etc_agent.integrations.tensors import shards_of
from etc_agent.integrations.train_state import TrainState
from etc_agent.migration.library import migrate
from etc_agent.state.layout import LogicalTensor, Shard


def migrate_weights(
    source: nn.Module | None,
    target: nn.Module | None,
    group: Any = None,
    *,
    dtype: torch.dtype | None = None,
    timeout_s: float = 300.0,
    verify: bool = False,
) -> int:
    """Give `target` the parameters and buffers that `source` has, as from a trainer to an inference server.

    Collective over `group`: trainers pass their `source`, servers their `target`, others None for both. The two are
    matched by name and may be sharded over their ranks in any way, as DTensors (FSDP2, tensor parallelism); plain
    tensors count as whole. `source` may have more than `target`. Needs memory for one more copy of `target`.

    Args:
        group: a `ProcessGroup`; by default the default group.
        dtype: the floating-point type in which weights travel, the same on every rank; the target keeps its own. Needed
            where the two models have different ones. By default each tensor's own.
        timeout_s: longest time without progress.
        verify: hash every box where it leaves and where it arrives.

    Returns:
        The bytes of this rank's part of `target`, as they have travelled.

    Raises:
        PlanError: `target` has a tensor that no `source` has, or one of another shape or dtype.
        MigrationError: a rank was lost, or did not call.
        EtcError: a tensor is a partial sum, or its local shape is not that of its placements.
    """
    have = {_as(dtype, shard): _cast(dtype, tensor) for shard, tensor in _shards(source).items()}
    places = {_as(dtype, shard): tensor for shard, tensor in _shards(target).items()}
    device = next((tensor.device for tensor in (*places.values(), *have.values())), torch.device("cpu"))
    found = migrate(have, places, group, device=device, timeout_s=timeout_s, verify=verify)
    with torch.no_grad():
        for shard, place in places.items():
            place.copy_(found[shard])
    return sum(tensor.nbytes for tensor in found.values())


def _shards(model: nn.Module | None) -> dict[Shard, torch.Tensor]:
    if model is None:
        return {}
    return {shard: tensor.detach() for shard, tensor in shards_of(TrainState(model, None)).items()}


def _as(dtype: torch.dtype | None, shard: Shard) -> Shard:
    own = getattr(torch, shard.tensor.dtype)
    if dtype is None or not own.is_floating_point:
        return shard
    name = str(dtype).removeprefix("torch.")
    return Shard(LogicalTensor(shard.tensor.name, shard.tensor.shape, name, dtype.itemsize), shard.box)


def _cast(dtype: torch.dtype | None, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
