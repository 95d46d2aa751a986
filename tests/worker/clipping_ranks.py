"""Run on 4 ranks: the norm over divided gradients, and the clipped gradients, are those of torch on the whole model."""

from __future__ import annotations

import copy
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.clipping import Clipping
from etc_agent.worker.context import ParallelContext


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.up, self.down, self.norm = nn.Linear(6, 9), nn.Linear(9, 6), nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)


def whole() -> Net:
    torch.manual_seed(0)
    model = Net()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def context(config: str, mesh: DeviceMesh) -> ParallelContext:
    return ParallelContext(ParallelConfig.parse(config), mesh, dist.get_rank(), torch.device("cpu"), 1, 4)


numbered: dict[int, torch.Tensor] = {}
"""By parameter: the numbers, in the whole, of the elements that this rank holds."""


def number_elements(model: nn.Module) -> None:
    """Called on a divided model that had the numbers of its elements as values when it was whole."""
    for parameter in model.parameters():
        held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        numbered[id(parameter)] = held.detach().clone()


def give_gradients(model: nn.Module, reference: nn.Module) -> None:
    """`model`'s parts of the gradients of `reference`."""
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        mine = theirs[name].grad.flatten()[numbered[id(parameter)].long()]
        if isinstance(parameter, DTensor):
            mine = DTensor.from_local(
                mine, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                stride=parameter.stride(),
            )
        parameter.grad = mine


def with_numbers() -> Net:
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
    return model


def check(name: str, model: nn.Module, reference: nn.Module, parallel: ParallelContext) -> None:
    number_elements(model)
    for order in (2.0, 1.0, math.inf):
        for max_norm in (0.5, 1e6):
            expected = copy.deepcopy(reference)
            for mine, theirs in zip(expected.parameters(), reference.parameters(), strict=True):
                mine.grad = theirs.grad.clone()
            their_norm = nn.utils.clip_grad_norm_(expected.parameters(), max_norm, order)
            give_gradients(model, reference)
            norm = Clipping.of(model, parallel).clip(max_norm, order, error_if_nonfinite=True)
            torch.testing.assert_close(norm, their_norm, rtol=1e-6, atol=0, msg=lambda text: f"{name}: {text}")
            clipped = dict(expected.named_parameters())
            for each, parameter in model.named_parameters():
                gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                torch.testing.assert_close(gradient, clipped[each].grad, rtol=1e-6, atol=1e-7)


def tensor_parallel(model: Net, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"tokens": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()})


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    reference = whole()
    grid = init_device_mesh("cpu", (1, 2, 1, 2), mesh_dim_names=("pp", "dp", "cp", "tp"))

    divided = with_numbers()
    tensor_parallel(divided, grid["tp"])
    check("tp", divided, reference, context("TP2DP2", grid))
    both = with_numbers()
    tensor_parallel(both, grid["tp"])
    fully_shard(both.up, mesh=grid["dp"])
    fully_shard(both, mesh=grid["dp"])
    check("fsdp x tp", both, reference, context("TP2DP2", grid))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    replicated = fully_shard(with_numbers(), mesh=hybrid)
    check("hsdp", replicated, reference, context("DP4", grid))
    check("plain", with_numbers(), reference, context("DP4", grid))

    # Two stages; both have the embedding's weight, the head's under the same name.
    stages = init_device_mesh("cpu", (2, 2, 1, 1), mesh_dim_names=("pp", "dp", "cp", "tp"))
    stage = with_numbers()
    for name in ("head", "norm") if dist.get_rank() < 2 else ("up", "down", "head"):
        delattr(stage, name)
    tied = whole()
    del tied.head
    fully_shard(stage, mesh=stages["dp"])
    check("stages", stage, tied, context("PP2DP2", stages))

    partial = nn.Linear(2, 2, bias=False)
    weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), grid["tp"], [Replicate()]))
    partial.weight = weight
    weight.grad = DTensor.from_local(torch.ones(2, 2), grid["tp"], [Partial()], run_check=False)
    refusal = ""
    try:
        Clipping.of(partial, context("TP2DP2", grid)).clip(1.0, 2.0, error_if_nonfinite=False)
    except ValueError as error:
        refusal = str(error)
    assert "redistribute it" in refusal
    weight.grad = distribute_tensor(torch.full((2, 2), math.nan), grid["tp"], [Shard(0)])
    try:
        Clipping.of(partial, context("TP2DP2", grid)).clip(1.0, 2.0, error_if_nonfinite=True)
    except RuntimeError as error:
        refusal = str(error)
    assert "cannot be clipped" in refusal
    print("norms agree")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
