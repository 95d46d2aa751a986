"""Tensor parallelism: parameters are DTensors, the arithmetic is on their local parts.

Every DTensor operation goes through a dispatcher whose sharding cache is empty in a new generation, which makes the
first step slow and each later one slower than need be. So a module computes with plain tensors: leaves that share the
storage of its DTensor parameters and gather gradients over a step's microbatches. `publish_gradients` hands these to
the parameters, as DTensors, where optimizers look for them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ParallelStyle


class ShardParameters(ParallelStyle):
    """Shard parameters of a `TensorParallelModule` over the tp axis: ``ShardParameters(weight=Shard(0))``."""

    def __init__(self, **placements: Placement) -> None:
        super().__init__()
        self._placements = placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, TensorParallelModule)
        for name, placement in self._placements.items():
            param = getattr(module, name)
            sharded = distribute_tensor(param.detach(), device_mesh, [placement], src_data_rank=None)
            setattr(module, name, nn.Parameter(sharded, requires_grad=param.requires_grad))
        module.group = device_mesh.get_group()
        return module


class TensorParallelModule(nn.Module):
    """A module that computes with the local parts of its parameters. `group`: the tp group once sharded."""

    group: dist.ProcessGroup | None = None

    def local(self, name: str) -> torch.Tensor:
        """This rank's part of the parameter `name`, as a leaf that gathers gradients."""
        param = getattr(self, name)
        if not isinstance(param, DTensor):
            return param
        leaves = self.__dict__.setdefault("_leaves", {})
        if name not in leaves:
            with torch.no_grad():
                leaves[name] = param.to_local().detach().requires_grad_(param.requires_grad)
        return leaves[name]

    def leaves(self) -> dict[str, torch.Tensor]:
        return self.__dict__.get("_leaves", {})

    def first_row(self, name: str) -> int:
        """Where this rank's part of `name` begins, in rows of the whole."""
        param = getattr(self, name)
        if not isinstance(param, DTensor):
            return 0
        return compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)[1][0]


def publish_gradients(model: nn.Module) -> None:
    """Move the gradients of local leaves into ``.grad`` of the DTensor parameters they belong to."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, TensorParallelModule):
                for name, leaf in module.leaves().items():
                    param = getattr(module, name)
                    if leaf.grad is not None:
                        param.grad = DTensor.from_local(
                            leaf.grad, param.device_mesh, param.placements,
                            run_check=False, shape=param.shape, stride=param.stride(),
                        )
                        leaf.grad = None


def drop_gradients(model: nn.Module) -> None:
    """Forget what an interrupted step has left behind."""
    for param in model.parameters():
        param.grad = None
    for module in model.modules():
        if isinstance(module, TensorParallelModule):
            for leaf in module.leaves().values():
                leaf.grad = None


def column_input(x: torch.Tensor, *layers: ColumnLinear) -> torch.Tensor:
    """`x` as the input of several `ColumnLinear`: each tp rank has a part of its gradient, summed here once for all."""
    group = layers[0].group
    return x if group is None else _SumGradient.apply(x, group)


class ColumnLinear(TensorParallelModule, nn.Linear):
    """A linear layer whose outputs are cut over tp (weight and bias on dim 0): (..., in) -> (..., out / tp).

    Its input must have passed through `column_input`.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return super().forward(x)
        return F.linear(x, self.local("weight"), None if self.bias is None else self.local("bias"))


class GatheredLinear(ColumnLinear):
    """A `ColumnLinear` whose outputs are put together again: (..., in) -> (..., out) on every tp rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(column_input(x, self))
        return y if self.group is None else _Gather.apply(y, self.group, self.first_row("weight"), self.out_features)


class RowLinear(TensorParallelModule, nn.Linear):
    """A linear layer whose inputs are cut over tp (weight on dim 1): (..., in / tp) -> (..., out) everywhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return super().forward(x)
        y = _Sum.apply(F.linear(x, self.local("weight")), self.group)
        return y if self.bias is None else y + self.local("bias")


class VocabEmbedding(TensorParallelModule, nn.Embedding):
    """An embedding whose rows are cut over tp (``weight=Shard(0)``): (...) int64 -> (..., width) on every tp rank."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return super().forward(tokens)
        weight = self.local("weight")
        if not len(weight):
            return _Sum.apply(weight.sum() + weight.new_zeros(*tokens.shape, self.embedding_dim), self.group)
        rows = tokens - self.first_row("weight")
        elsewhere = (rows < 0) | (rows >= len(weight))
        embedded = F.embedding(rows.masked_fill(elsewhere, 0), weight)
        return _Sum.apply(embedded.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)


class _SumGradient(torch.autograd.Function):
    """Forward: the same. Backward: the sum over the group."""

    @staticmethod
    def forward(ctx, x, group):  # type: ignore[override]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """Forward: the sum over the group. Backward: the same."""

    @staticmethod
    def forward(ctx, x, group):  # type: ignore[override]
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad, None


class _Gather(torch.autograd.Function):
    """Forward: the whole last dim of `total`, of which this rank has the part from `first`. Backward: that part."""

    @staticmethod
    def forward(ctx, x, group, first, total):  # type: ignore[override]
        ctx.part = slice(first, first + x.shape[-1])
        gathered = x.new_zeros(*x.shape[:-1], total)
        gathered[..., ctx.part] = x
        dist.all_reduce(gathered, group=group)
        return gathered

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad[..., ctx.part].contiguous(), None, None, None
