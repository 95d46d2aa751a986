"""Which boxes of which logical tensors a Megatron model and its optimizer hold on this rank.

`sharded_state_dict` says it of every parameter: a key that does not depend on the pipeline stage, the global shape, the
offset, and a live view. A fused SwiGLU projection holds two boxes. Layers are stacked along extra leading dims of the
global shape; here each layer is a logical tensor of its own. Optimizer state lies as its parameter does; with the
distributed optimizer a rank has a flat range of it.

Names: ``model.<key>``, and ``optimizer.<key>.<name of the state>``, of which ``main`` are the fp32 parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer

from etc_agent.errors import EtcError
from etc_agent.integrations.tensors import logical_tensor
from etc_agent.state.algebra import flat_range
from etc_agent.state.boxes import Box, whole
from etc_agent.state.layout import Shard

MAIN = "main"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One box of a parameter. `key`, `shape`: of the logical tensor. `start`: the element of the parameter at which the
    box begins; it is contiguous from there."""

    key: str
    shape: tuple[int, ...]
    box: Box
    start: int

    def shard(self, name: str, dtype: torch.dtype) -> Shard:
        return Shard(logical_tensor(name, self.shape, dtype), self.box)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The box in a contiguous tensor of the parameter's size."""
        return tensor.view(-1)[self.start : self.start + self.box.num_elements].view(self.box.shape)

    def in_range(self, start: int, end: int) -> list[tuple[Box, int]]:
        """The boxes of the parameter's elements [start, end) that are of this leaf, each with its place in the
        range."""
        low = max(start, self.start) - self.start
        high = min(end, self.start + self.box.num_elements) - self.start
        found, at = [], self.start + low - start
        for part in flat_range(self.box, low, high):
            found.append((part, at))
            at += part.num_elements
        return found


def boxes_of(chunks: list[Any], optimizer: MegatronOptimizer | None) -> dict[Shard, torch.Tensor]:
    """Every box on this rank -> its view of the live tensors.

    Raises:
        EtcError: a parameter is not described by its module, or state has another shape than its parameter.
    """
    found: dict[Shard, torch.Tensor] = {}
    leaves: dict[torch.Tensor, list[Leaf]] = {}
    for chunk in chunks:
        module = chunk
        while hasattr(module, "module"):
            module = module.module
        names = {id(param): name for name, param in module.named_parameters()}
        described = _described(module)
        for param, of_it in described.items():
            for leaf in of_it:
                found.setdefault(leaf.shard(f"model.{leaf.key}", param.dtype), leaf.view(param.detach()))
        leaves |= described
        missing = [name for param_id, name in names.items() if param_id not in {id(each) for each in described}]
        if missing:
            raise EtcError(
                f"{', '.join(missing[:5])}: not in the sharded_state_dict of {type(module).__name__}, so it is not "
                "known which part of the model it is; describe it there, as Megatron's distributed checkpoints need too"
            )
    if optimizer is not None:
        for part in parts_of(optimizer):
            found |= _state_of(part, leaves)
    return found


def parts_of(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that `optimizer` chains, without those that have no parameters here."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def _described(module: Any) -> dict[torch.Tensor, list[Leaf]]:
    """Parameter (or buffer) -> its boxes, by the module's own description."""
    found: dict[torch.Tensor, list[Leaf]] = {}
    for value in nested_values(module.sharded_state_dict()):
        if isinstance(value, ShardedTensorFactory):
            tensor = value.data
            numbers = torch.arange(tensor.numel()).view(tensor.shape)
            made: Any = value.build_fn(value.key, numbers, value.replica_id, None)
            parts = list(nested_values(made if isinstance(made, dict | list) else [made]))
        elif isinstance(value, ShardedTensor) and value.data is not None:
            tensor, parts = value.data, [value]
        else:
            continue
        found[tensor] = [_leaf(part, is_index=part.data is not tensor) for part in parts]
    return found


def _leaf(part: ShardedTensor, *, is_index: bool) -> Leaf:
    """`is_index`: the part's data are the numbers of the parameter's elements that it has."""
    num_leading = part.prepend_axis_num
    layer = ".".join(str(index) for index in part.global_offset[:num_leading])
    key = f"{part.key}.{layer}" if layer else part.key
    shape, offset = part.global_shape[num_leading:], part.global_offset[num_leading:]
    box = Box(tuple(map(int, offset)), tuple(map(int, part.local_shape)))
    start = 0
    if is_index:
        numbers = part.data.reshape(-1)
        start = int(numbers[0]) if numbers.numel() else 0
        if not torch.equal(numbers, torch.arange(start, start + numbers.numel())):
            raise EtcError(f"{key} is not contiguous in its parameter; this is not supported")
    return Leaf(key, tuple(map(int, shape)), box, start)


def _state_of(part: Any, leaves: Mapping[torch.Tensor, list[Leaf]]) -> dict[Shard, torch.Tensor]:
    """The optimizer state of one of Megatron's optimizers, main parameters included."""
    found: dict[Shard, torch.Tensor] = {}
    for param, start, end, state in _states(part):
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            for leaf in leaves[param]:
                name = f"optimizer.{leaf.key}.{key}"
                if value.dim() == 0:
                    if leaf.in_range(start, end):
                        found[Shard(logical_tensor(name, (), value.dtype), whole(()))] = value
                    continue
                if value.numel() != end - start:
                    raise EtcError(
                        f"{name} has {value.numel()} elements on this rank, and its parameter {end - start}; only "
                        "optimizers whose state has the shape of its parameter can be carried"
                    )
                flat = value.detach().view(-1)
                for box, at in leaf.in_range(start, end):
                    view = flat[at : at + prod(box.shape)].view(box.shape)
                    found[Shard(logical_tensor(name, leaf.shape, value.dtype), box)] = view
    return found


def _states(part: Any) -> Iterator[tuple[torch.Tensor, int, int, dict[str, Any]]]:
    """(parameter of the model, the range [start, end) of its elements of which this rank has the state, the state)."""
    if isinstance(part, DistributedOptimizer):
        for param in part.model_param_group_index_map:
            held = part._get_model_param_range_map(param)["param"]
            state = dict(part._get_main_param_and_optimizer_states(param))
            main = state.pop("param")
            if main.dtype != param.dtype:  # else it is a part of the parameter itself
                state[MAIN] = main
            yield param, held.start, held.end, state
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for models, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            for param, main in zip(models, mains, strict=True):
                yield param, 0, param.numel(), {**part.optimizer.state[main], MAIN: main}
        for params in part.fp32_from_fp32_groups:
            for param in params:
                yield param, 0, param.numel(), part.optimizer.state[param]
    else:
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                yield param, 0, param.numel(), part.optimizer.state[param]
