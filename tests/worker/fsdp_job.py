"""A tiny FSDP2 job: every block is sharded over dp by `fully_shard`, and so is what is left of the model."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import etc_agent as etc
from etc_agent.integrations.native import shards_of

WIDTH, LAYERS = 12, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(parallel: etc.ParallelContext) -> etc.TrainState:
    if parallel.config.pp > 1 or parallel.config.tp > 1:
        raise ValueError(f"{parallel.config}: this model is only data parallel")
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=parallel.mesh["dp"])
    fully_shard(model, mesh=parallel.mesh["dp"])
    return etc.TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-3), init=initialise)


def initialise(state: etc.TrainState) -> None:
    """Weights as a function of name and position, whatever the sharding."""
    for shard, local in shards_of(state).items():
        if shard.tensor.name.startswith("model."):
            generator = torch.Generator().manual_seed(sum(shard.tensor.name.encode()))
            whole = (torch.rand(shard.tensor.shape, generator=generator) - 0.5) * 0.2
            local.copy_(whole[tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.shape, strict=True))])


class Samples:
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(WIDTH, dtype=torch.float32) * (index % 97 + 1) * 0.1)


def main(log: Path, num_steps: int, pause_s: float, fault: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    with etc.session(build, global_batch=12, timeout_s=60.0, switch_timeout_s=60.0) as session:
        data = Samples()
        for step in session.steps(num_steps):
            with step:
                batch = session.batch(data)
                loss = ((session.state.model(batch) - torch.cos(batch)) ** 2).mean()
                # Most of the time is spent where the parameters are unsharded, as in a large model.
                time.sleep(pause_s)
                loss.backward()
                step.commit()
            if fault.get("evaluates"):
                with torch.no_grad():
                    session.state.model(batch)
            line = {
                "step": step.index, "loss": loss.item(), "generation": session.generation, "rank": session.parallel.rank
            }
            with open(log / f"steps-{os.getpid()}.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
            if (log / "last").exists() and step.index >= int((log / "last").read_text()):
                break
