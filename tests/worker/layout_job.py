"""A tensor-parallel layer that is cut by hand: its fused weight holds this rank's part of each of three projections."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import etc_agent as etc

WIDTH = 8


class Fused(nn.Module):
    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.empty(3 * WIDTH // num_parts, WIDTH))
        self.out = nn.Parameter(torch.empty(WIDTH, WIDTH // num_parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum over tp."""
        query, key, value = (x @ self.fused.T).chunk(3, -1)
        return torch.tanh(query * key + value) @ self.out.T


def build(parallel: etc.ParallelContext) -> etc.TrainState:
    num_parts, part = parallel.config.tp, parallel.coordinate.tp
    model = Fused(num_parts)

    def layout(name: str, tensor: torch.Tensor) -> list[etc.Piece]:
        if name == "fused":
            return etc.cut((3 * WIDTH, WIDTH), 0, part, num_parts, (WIDTH, WIDTH, WIDTH))
        return etc.cut((WIDTH, WIDTH), 1, part, num_parts)

    def initialise(state: etc.TrainState) -> None:
        numbers = torch.Generator().manual_seed(7)
        fused, out = (torch.rand(rows, WIDTH, generator=numbers) - 0.5 for rows in (3 * WIDTH, WIDTH))
        model.fused.copy_(torch.cat([block.chunk(num_parts)[part] for block in fused.split(WIDTH)]))
        model.out.copy_(out.chunk(num_parts, 1)[part])

    return etc.TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-2), layout=layout, init=initialise)


class Samples:
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(WIDTH, dtype=torch.float32) * (index % 97 + 1) * 0.1)


def main(log: Path, num_steps: int, pause_s: float, fault: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    with etc.session(build, global_batch=12, timeout_s=60.0, switch_timeout_s=60.0) as session:
        for step in session.steps(num_steps):
            with step:
                parallel, model = session.parallel, session.state.model
                batch = session.batch(Samples())
                part = model(batch)
                others = part.detach().clone()
                dist.all_reduce(others, group=parallel.mesh["tp"].get_group())
                # The sum over tp, of which this rank differentiates its own part.
                loss = ((part + (others - part.detach()) - torch.cos(batch)) ** 2).mean()
                loss.backward()
                for param in model.parameters():
                    dist.all_reduce(param.grad, group=parallel.mesh["dp"].get_group())
                    param.grad /= parallel.config.dp
                mean = loss.detach().clone()
                dist.all_reduce(mean, group=parallel.mesh["dp"].get_group())
                time.sleep(pause_s)
                step.commit()
            line = {
                "step": step.index, "loss": mean.item() / parallel.config.dp, "generation": session.generation,
                "rank": parallel.rank,
            }
            with open(log / f"steps-{os.getpid()}.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
            if (log / "last").exists() and step.index >= int((log / "last").read_text()):
                break
