"""The named tensors of a training state, and the boxes that this rank's parts of them fill.

Names are global: ``model.<fqn>`` for parameters and buffers, ``optimizer.<fqn>.<key>`` for optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from etc_agent.errors import EtcError
from etc_agent.integrations.aliases import aliases_of, local_tensor
from etc_agent.integrations.json_values import encode
from etc_agent.integrations.layouts import Piece
from etc_agent.integrations.train_state import TrainState
from etc_agent.state.boxes import Box, whole
from etc_agent.state.layout import LogicalTensor, Shard
from etc_agent.torch_private.dtensors import local_part, local_shape_and_offset


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A tensor of the state, and the boxes of logical tensors that its local part holds: the `pieces` that the script's
    layout gives, or, where it gives none, one box that is all of it. `shards`: of the pieces, in their order."""

    name: str
    tensor: torch.Tensor
    shards: tuple[Shard, ...]
    pieces: tuple[Piece, ...] = ()

    @property
    def shard(self) -> Shard:
        """The only one, of a tensor that is one box."""
        (shard,) = self.shards
        return shard

    @property
    def is_one_box(self) -> bool:
        return not self.pieces and len(self.shards) == 1

    def views(self, local: torch.Tensor) -> dict[Shard, torch.Tensor]:
        """The boxes inside `local`, which is this tensor's local part or another one of its shape."""
        if not self.pieces:
            return dict.fromkeys(self.shards, local)
        return {shard: piece.view(local) for shard, piece in zip(self.shards, self.pieces, strict=True)}


Kind = tuple[Any, ...]
"""What the boxes of a named tensor depend on."""


def shards_of(state: TrainState) -> dict[Shard, torch.Tensor]:
    """Every box that this rank holds: its shard of the logical tensor -> the part of a local plain tensor.

    The parts are live views (or meta tensors) of the box's shape. Replicas are listed on every rank that has one. A
    tied parameter is listed once, under the first of its names, and a view of another tensor not at all. Empty shards
    are listed with empty boxes.

    Raises:
        EtcError: the optimizer holds a parameter that the model does not, or state that is no box of its parameter.
    """
    return _views(own_places(state))


def held_shards(state: TrainState) -> dict[Shard, torch.Tensor]:
    """`shards_of`, including views of other tensors: everything that a worker can send to the next generation."""
    return _views(places_of(state))


def own_places(state: TrainState) -> dict[str, Placed]:
    """`places_of`, without views of other tensors (`aliases`).

    Raises:
        EtcError: as for `shards_of`, and where tensors overlap otherwise.
    """
    places = places_of(state)
    aliases = aliases_of({name: placed.tensor for name, placed in places.items()})
    return {name: placed for name, placed in places.items() if name not in aliases}


def places_of(state: TrainState) -> dict[str, Placed]:
    """Parameters, buffers (the non-persistent ones too) and optimizer state by name, with their boxes. These are
    computed once for tensors that stay of one kind, since training may stand still meanwhile."""
    known: dict[str, tuple[Kind, Placed]] = state.memo.setdefault("places", {})
    alike: dict[Kind, Shard] = {}
    places: dict[str, Placed] = {}
    for name, tensor, parent in _tensors(state):
        kind = _kind(tensor)
        found = known.get(name)
        if found is None or found[0] != kind:
            placed = _placed(state, name, tensor, places.get(f"model.{parent}"), alike)
        elif found[1].tensor is tensor:
            placed = found[1]
        else:
            placed = Placed(name, tensor, found[1].shards, found[1].pieces)
        known[name] = kind, placed
        places[name] = placed
    return places


def named_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """The tensors of `own_places`, DTensors as they are."""
    return {name: placed.tensor for name, placed in own_places(state).items()}


def all_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """`named_tensors`, and the views of others among them."""
    return {name: tensor for name, tensor, _ in _tensors(state)}


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
    logical = logical_tensor(name, shape, tensor.dtype)
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


def logical_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> LogicalTensor:
    return LogicalTensor(name, shape, str(dtype).removeprefix("torch."), dtype.itemsize)


def _views(places: Mapping[str, Placed]) -> dict[Shard, torch.Tensor]:
    return {
        shard: view
        for placed in places.values()
        for shard, view in placed.views(local_tensor(placed.tensor)).items()
    }


def _tensors(state: TrainState) -> Iterator[tuple[str, torch.Tensor, str | None]]:
    """(name, tensor, for optimizer state the name of its parameter)."""
    for name, param in state.model.named_parameters():
        yield f"model.{name}", param, None
    for name, buffer in state.model.named_buffers():
        yield f"model.{name}", buffer, None
    if state.optimizer is None:
        return
    for name, param in optimizer_parameters(state.model, state.optimizer).items():
        for key, value in state.optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                _check_box(f"optimizer.{name}.{key}", value, param)
                yield f"optimizer.{name}.{key}", value, name
            else:
                # Carried beside the tensors (`parameter_values`), as far as it can be written as JSON.
                encode(value, f"optimizer.{name}.{key}")


def _kind(tensor: torch.Tensor) -> Kind:
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.dtype, local_part(tensor).shape, tensor.device_mesh, tensor.placements
    return tensor.shape, tensor.dtype


def _placed(
    state: TrainState, name: str, tensor: torch.Tensor, parent: Placed | None, alike: dict[Kind, Shard]
) -> Placed:
    if parent is not None and parent.pieces:
        return _beside_pieces(name, tensor, parent)
    pieces = _given(state.layout, name, tensor) if parent is None else ()
    if pieces:
        return Placed(name, tensor, _shards(name, pieces, tensor.dtype, lambda logical: f"model.{logical}"), pieces)
    kind = _kind(tensor)
    first = alike.get(kind)
    if first is None:
        first = alike[kind] = shard_of(name, tensor)
    known = first.tensor
    return Placed(name, tensor, (Shard(LogicalTensor(name, known.shape, known.dtype, known.itemsize), first.box),))


def _given(layout: Any, name: str, tensor: torch.Tensor) -> tuple[Piece, ...]:
    """What the script's layout says of a parameter or buffer; empty where it says nothing."""
    given = layout(name.removeprefix("model."), local_tensor(tensor)) if layout is not None else None
    if given is None:
        return ()
    pieces = tuple(given)
    if isinstance(tensor, DTensor):
        raise EtcError(f"TrainState.layout gave pieces of {name}, which is a DTensor and says itself what it holds")
    for piece in pieces:
        if not isinstance(piece, Piece):
            raise EtcError(f"TrainState.layout gave {piece!r} for {name}; expected etc_agent.Piece objects, or None")
        piece.check(name, local_tensor(tensor))
    if sum(piece.box.num_elements for piece in pieces) > tensor.numel():
        raise EtcError(f"TrainState.layout gave pieces of {name} that overlap in its {tensor.numel()} elements")
    return pieces


def _shards(
    name: str, pieces: tuple[Piece, ...], dtype: torch.dtype, named: Callable[[str], str]
) -> tuple[Shard, ...]:
    own = name.removeprefix("model.")
    return tuple(Shard(logical_tensor(named(piece.name or own), piece.shape, dtype), piece.box) for piece in pieces)


def _beside_pieces(name: str, tensor: torch.Tensor, parent: Placed) -> Placed:
    """Optimizer state of a parameter that holds pieces: of its shape, with the same pieces; or a single number, which
    each of the logical parameters has."""
    key = name.removeprefix(f"optimizer.{parent.name.removeprefix('model.')}.")

    def named(logical: str) -> str:
        return f"optimizer.{logical}.{key}"

    if tensor.shape == parent.tensor.shape:
        return Placed(name, tensor, _shards(parent.name, parent.pieces, tensor.dtype, named), parent.pieces)
    if tensor.dim():
        raise EtcError(_other_shape(name, tensor, parent.tensor))
    logicals = dict.fromkeys(shard.tensor.name.removeprefix("model.") for shard in parent.shards)
    scalar = tuple(Shard(logical_tensor(named(logical), (), tensor.dtype), whole(())) for logical in logicals)
    return Placed(name, tensor, scalar)


def _check_box(name: str, value: torch.Tensor, param: torch.Tensor) -> None:
    """Check a plain tensor beside a sharded parameter: it is a replica only if its values cannot depend on the
    sharding."""
    if isinstance(param, DTensor) and not isinstance(value, DTensor) and value.dim() > 0:
        sharded = any(not placement.is_replicate() for placement in param.placements)
        if sharded:
            raise EtcError(_other_shape(name, value, local_part(param)))


def _other_shape(name: str, value: torch.Tensor, local: torch.Tensor) -> str:
    return (
        f"{name} of shape {tuple(value.shape)} belongs to a sharded parameter of local shape {tuple(local.shape)}; a "
        "plain tensor beside it is another one on each rank, and cannot be cut in another way: make it a DTensor (as "
        "zeros_like(param) is), or use an optimizer that does"
    )
