"""Four ranks train with FSDP2 x TP, the last one serves the whole model, and gets new weights every few steps.

torchrun --nproc-per-node 5 examples/torchrun/trainer_to_server.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, TRAINERS = 64, 4


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 1))


def samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x, x.sin().sum(dim=1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between two sets of weights for the server")
    args = parser.parse_args()

    dist.init_process_group()
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (TRAINERS // 2, 2), mesh_dim_names=("dp", "tp"))
    trainer, server = None, None
    torch.manual_seed(1)
    if rank < TRAINERS:
        trainer = network()
        parallelize_module(trainer, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(trainer, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(trainer.parameters(), lr=3e-3)
    else:
        server = network()
        tests = samples(256, seed=0)

    for step in range(1, args.steps + 1):
        if trainer is not None:
            inputs, targets = samples(32, seed=step * TRAINERS + mesh["dp"].get_local_rank())
            nn.functional.mse_loss(trainer(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % args.every == 0:
            for name, parameter in (trainer or server).named_parameters():
                whole = parameter.data if trainer is None else parameter.full_tensor()
                dist.broadcast(whole, src=0)
                if server is not None:
                    server.get_parameter(name).data.copy_(whole)
            if server is not None:
                with torch.no_grad():
                    loss = nn.functional.mse_loss(server(tests[0]), tests[1])
                print(f"step {step} loss {loss.item():.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
