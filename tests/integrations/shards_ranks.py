"""Run on 4 ranks: every shard that is reported must be that part of the gathered whole.

The whole comes from DTensor.full_tensor and from the unsharded model, neither of which `shards_of` uses.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from etc_agent.integrations.native import TrainState, create_optimizer_state, materialise, shards_of


class Model(nn.Module):
    """Uneven everywhere: 7 hidden units over 2 or 4 ranks, a bias of 3 over 4 ranks (one of them gets nothing)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)
        self.narrow = nn.Linear(6, 3)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("scale", torch.arange(6.0))
        self.register_buffer("hidden_scale", torch.arange(3.0), persistent=False)


PLAN = {
    "embedding": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "narrow": ColwiseParallel(),
}


def check(name: str, state: TrainState, expected: dict[str, torch.Tensor]) -> None:
    """Each shard is the part of `expected` that its box names, and the shards of all ranks cover everything."""
    shards = shards_of(state)
    names = {shard.tensor.name for shard in shards}
    assert len(names) == len(shards), f"{name}: a tensor is listed twice"
    assert names == set(expected), f"{name}: {names ^ set(expected)}"
    for shard, local in shards.items():
        whole = expected[shard.tensor.name]
        assert shard.tensor.shape == tuple(whole.shape)
        assert shard.tensor.dtype == str(whole.dtype).removeprefix("torch.")
        assert not isinstance(local, DTensor)
        assert shard.box.shape == tuple(local.shape)
        cut = tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.shape, strict=True))
        assert torch.equal(local, whole[cut]), f"{name}: {shard}"
        covered = torch.zeros(whole.shape)
        covered[cut] += 1
        dist.all_reduce(covered)
        assert (covered > 0).all(), f"{name}: {shard.tensor.name} has holes"


def whole_state(state: TrainState) -> dict[str, torch.Tensor]:
    """The logical state, gathered by DTensor itself."""
    whole = {f"model.{name}": tensor.detach() for name, tensor in state.model.named_parameters()}
    whole |= {f"model.{name}": tensor for name, tensor in state.model.named_buffers()}
    for name, param in state.model.named_parameters():
        whole |= {f"optimizer.{name}.{key}": value for key, value in state.optimizer.state[param].items()}
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in whole.items()}


def train_step(state: TrainState) -> None:
    """With gradients of each parameter's own placements, which DTensor's backward does not give for empty shards."""
    for param in state.model.parameters():
        param.grad = param.detach().clone() + 0.5
    state.optimizer.step()
    state.optimizer.zero_grad()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    reference = Model()
    reference_parts = {f"model.{name}": tensor.detach() for name, tensor in reference.named_parameters()}
    meshes = {
        "tp2": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        "tp4": init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp")),
    }
    for name, mesh in meshes.items():
        for sharded_dp in (False, True):
            label = f"{name}{' with FSDP2' if sharded_dp else ''}"
            model = parallelize_module(copy.deepcopy(reference), mesh["tp"], PLAN)
            if sharded_dp:
                fully_shard(model, mesh=mesh["dp"])
            state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1))
            gathered = {f"model.{n}": p.full_tensor() if isinstance(p, DTensor) else p for n, p in
                        model.named_parameters()}
            for key, tensor in reference_parts.items():
                assert torch.equal(gathered[key], tensor), f"{label}: {key} was not sharded from the reference"
            train_step(state)
            check(label, state, whole_state(state))
            if not sharded_dp:
                check_round_trip(label, mesh, state)
    dist.barrier()
    dist.destroy_process_group()
    print("shards agree")


def check_round_trip(label: str, mesh: dist.DeviceMesh, state: TrainState) -> None:
    """A state built on the meta device, filled from the shards of another, trains on exactly as that one."""
    with torch.device("meta"):
        model = parallelize_module(Model(), mesh["tp"], PLAN)
        again = TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    create_optimizer_state(again)
    source = {shard: local.clone() for shard, local in shards_of(state).items()}
    assert set(shards_of(again)) == set(source), f"{label}: the state on meta has other shards"
    materialise(again, lambda placed, meta: source[placed.shard].clone())
    for shard, local in shards_of(again).items():
        local.copy_(source[shard])
    for trained in (state, again):
        train_step(trained)
    check(f"{label} after the round trip", again, whole_state(state))


if __name__ == "__main__":
    main()
