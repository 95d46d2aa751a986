"""Opens a session and compares every rank's part of the state with the plain model.

    module_ranks.py CONFIG         with init="module"
    module_ranks.py CONFIG FOLDER  with the weights there; the constructors draw other random numbers then
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import etc_agent as etc
from etc_agent.integrations.native import shards_of

SEED, LAYERS = 5, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("frequencies", torch.rand(3), persistent=False)
        self.register_buffer("positions", torch.arange(4.0), persistent=False)


class Stage(nn.Module):
    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): Block() for layer in layers})


def build(parallel: etc.ParallelContext) -> etc.TrainState:
    stage, config = parallel.coordinate.pp, parallel.config
    model = Stage(range(stage * LAYERS // config.pp, (stage + 1) * LAYERS // config.pp))
    if config.tp > 1:
        plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
        parallelize_module(model, parallel.mesh["tp"], plan)
    if config.dp > 1:
        fully_shard(model, mesh=parallel.mesh["dp"])
    return etc.TrainState(model, torch.optim.AdamW(model.parameters()), init=(*sys.argv[2:], "module")[0])


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    plain = Stage(range(LAYERS))
    expected = {f"model.{name}": tensor.detach() for name, tensor in plain.named_parameters()}
    expected |= {f"model.{name}": tensor for name, tensor in plain.named_buffers()}
    with etc.session(build, seed=SEED, parallel=sys.argv[1], global_batch=4) as session:
        held = [(shard, local) for shard, local in shards_of(session.state).items() if shard.tensor.name in expected]
        for shard, local in held:
            if shard.tensor.name.endswith("frequencies") and sys.argv[2:]:
                continue
            part = tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.shape, strict=True))
            assert torch.equal(local, expected[shard.tensor.name][part]), shard
        drawn = torch.rand(1)
        draws = [torch.empty(1) for _ in range(dist.get_world_size())]
        dist.all_gather(draws, drawn)
        assert len({draw.item() for draw in draws}) == len(draws), "each rank has a random stream of its own"
        print(f"{len(held)} shards agree")


if __name__ == "__main__":
    main()
