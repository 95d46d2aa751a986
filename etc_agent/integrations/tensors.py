"""The named tensors of a training state, and the boxes that this rank's parts of them fill.

Names are global: ``model.<fqn>`` for parameters and buffers, ``optimizer.<fqn>.<key>`` for optimizer state.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from etc_agent.errors import EtcError
from etc_agent.integrations.aliases import aliases_of, local_tensor
from etc_agent.integrations.json_values import encode
from etc_agent.integrations.train_state import TrainState
from etc_agent.state.boxes import Box, whole
from etc_agent.state.layout import LogicalTensor, Shard
from etc_agent.torch_private.dtensors import local_part, local_shape_and_offset


def shards_of(state: TrainState) -> dict[Shard, torch.Tensor]:
    """Every tensor that this rank holds: its shard of the logical tensor -> the local plain tensor.

    The local tensors are live views (or meta tensors) of the box's shape. Replicas are listed on every rank that has
    one. A tied parameter is listed once, under the first of its names, and a view of another tensor not at all. Empty
    shards are listed with empty boxes.

    Raises:
        EtcError: the optimizer holds a parameter that the model does not, or state that is no box of its parameter.
    """
    return {shard_of(name, tensor): local_tensor(tensor) for name, tensor in named_tensors(state).items()}


def held_shards(state: TrainState) -> dict[Shard, torch.Tensor]:
    """`shards_of`, including views of other tensors: everything that a worker can send to the next generation."""
    return {shard_of(name, tensor): local_tensor(tensor) for name, tensor in all_tensors(state).items()}


def named_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Parameters, buffers (the non-persistent ones too) and optimizer state by global name, DTensors as they are. Views
    of others (`aliases`) are not listed.

    Raises:
        EtcError: as for `shards_of`, and where tensors overlap otherwise.
    """
    tensors = all_tensors(state)
    aliases = aliases_of(tensors)
    return {name: tensor for name, tensor in tensors.items() if name not in aliases}


def all_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """`named_tensors`, and the views of others among them."""
    tensors: dict[str, torch.Tensor] = {f"model.{name}": param for name, param in state.model.named_parameters()}
    tensors |= {f"model.{name}": buffer for name, buffer in state.model.named_buffers()}
    if state.optimizer is not None:
        for name, param in optimizer_parameters(state.model, state.optimizer).items():
            for key, value in state.optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    _check_box(f"optimizer.{name}.{key}", value, param)
                    tensors[f"optimizer.{name}.{key}"] = value
                else:
                    # Carried beside the tensors (`parameter_values`), as far as it can be written as JSON.
                    encode(value, f"optimizer.{name}.{key}")
    return tensors


def optimizer_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer updates, by fully qualified name, in the order of its groups."""
    names = {id(param): name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if id(param) not in names:
            raise EtcError(
                f"the optimizer updates a parameter of shape {tuple(param.shape)} that the model does not have; "
                "give the optimizer the parameters of TrainState.model"
            )
    return {names[id(param)]: param for param in params}


def shard_of(name: str, tensor: torch.Tensor) -> Shard:
    """The shard of the logical tensor `name` that this rank's `tensor` is."""
    shape = tuple(tensor.shape)
    logical = LogicalTensor(name, shape, str(tensor.dtype).removeprefix("torch."), tensor.dtype.itemsize)
    if not isinstance(tensor, DTensor):
        return Shard(logical, whole(shape))
    if any(placement.is_partial() for placement in tensor.placements):
        raise EtcError(f"{name} has placements {tensor.placements}; a partial sum is not state, redistribute it first")
    local_shape, offset = local_shape_and_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if local_shape != tuple(local_part(tensor).shape):
        raise EtcError(
            f"{name} has the local shape {tuple(local_part(tensor).shape)}, but {tensor.placements} of {shape} "
            f"over a mesh of {tuple(tensor.device_mesh.shape)} give {local_shape}; use distribute_tensor"
        )
    return Shard(logical, Box(offset, local_shape))


def _check_box(name: str, value: torch.Tensor, param: torch.Tensor) -> None:
    """Check a plain tensor beside a sharded parameter: it is a replica only if its values cannot depend on the
    sharding."""
    if isinstance(param, DTensor) and not isinstance(value, DTensor) and value.dim() > 0:
        sharded = any(not placement.is_replicate() for placement in param.placements)
        if sharded:
            raise EtcError(
                f"{name} of shape {tuple(value.shape)} belongs to a sharded parameter of local shape "
                f"{tuple(local_part(param).shape)}; a plain tensor beside it is another one on each rank, and cannot "
                "be cut in another way: make it a DTensor (as zeros_like(param) is), or use an optimizer that does"
            )
