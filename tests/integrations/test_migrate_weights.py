"""`etc_agent.migrate_weights`: a trainer's weights in an inference model, while both live."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import etc_agent
from etc_agent.planner.errors import PlanError
from tests.migration.processes import run_workers, values


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5), nn.BatchNorm1d(5))
    model[3].running_mean.copy_(torch.randn(5))
    return model


def trainer_and_server(rank: int, size: int, store: dist.Store) -> Any:
    """Ranks 0 to 3 train with FSDP2 x TP, rank 4 serves the whole model, in float32 and in bfloat16."""
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=size)
    torch.manual_seed(1)
    whole = network()
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    if rank < 4:
        trained = network()
        trained.load_state_dict(whole.state_dict())
        parallelize_module(trained, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(trained, mesh=mesh["dp"])
        trained(torch.ones(2, 6)).sum().backward()
        torch.optim.SGD(trained.parameters(), lr=0.1).step()
        gathered = {name: p.full_tensor() for name, p in trained.named_parameters()}
        etc_agent.migrate_weights(trained, None, verify=True)
        etc_agent.migrate_weights(trained, None, dtype=torch.bfloat16)
        try:
            etc_agent.migrate_weights(trained, None)
        except PlanError as error:
            return gathered, "extra" in str(error)
    torch.manual_seed(2)
    served, small = network(), network().to(torch.bfloat16)
    taken = etc_agent.migrate_weights(None, served, verify=True)
    etc_agent.migrate_weights(None, small, dtype=torch.bfloat16)
    large = nn.Sequential(*served, nn.ModuleDict({"extra": nn.Linear(2, 2)}))
    try:
        etc_agent.migrate_weights(None, large)
    except PlanError as error:
        return dict(served.state_dict()), dict(small.named_parameters()), taken, "extra" in str(error)
    return None


def test_a_whole_model_gets_the_weights_of_one_that_is_sharded_over_other_ranks() -> None:
    *trained, (served, small, taken, is_named) = values(run_workers(trainer_and_server, 5, limit_s=180))
    assert is_named
    assert all(told for _, told in trained)
    gathered = trained[0][0]
    assert len(gathered) == 6
    for name, weight in gathered.items():
        assert torch.equal(served[name], weight), name
        assert torch.equal(small[name], weight.bfloat16()), name
    assert taken == sum(tensor.nbytes for tensor in served.values())
