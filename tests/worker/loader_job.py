"""A data parallel job that trains with microbatches from a loader, at any dp. Each worker writes what it trained on."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import etc_agent as etc

WIDTH = 4
GLOBAL_BATCH = 10


class Points(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.sin(torch.arange(WIDTH, dtype=torch.float64) + index)
        return {"x": x + 0.01 * torch.rand(WIDTH, dtype=torch.float64), "index": index, "pid": os.getpid()}


def model() -> nn.Module:
    return nn.Linear(WIDTH, 1, dtype=torch.float64)


def loss_of(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return ((network(x) - x.prod(-1, keepdim=True)) ** 2).mean()


def build(parallel: etc.ParallelContext) -> etc.TrainState:
    if parallel.config.num_ranks != parallel.config.dp:
        raise ValueError("this job is data parallel only")
    network = model()
    return etc.TrainState(network, torch.optim.SGD(network.parameters(), lr=0.05), init=initialise)


def initialise(state: etc.TrainState) -> None:
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.fill_(0.1)


def main(log: Path, num_steps: int, pause_s: float, fault: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    # The mini agent starts its workers as daemons, which multiprocessing allows no children.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    session = etc.session(build, global_batch=GLOBAL_BATCH, division="weighted", seed=7, timeout_s=60.0)
    loader = session.loader(Points(), batch_size=2, shuffle=3, num_workers=1)
    with session:
        for step in session.steps(num_steps):
            pids: set[int] = set()
            with step:
                group = session.parallel.mesh.get_group("dp")
                used, losses = [], torch.zeros((), dtype=torch.float64)
                for micro in session.microbatches(loader, reduction="sum"):
                    loss = loss_of(session.state.model, micro.batch["x"])
                    (loss * micro.factor).backward()
                    losses += loss.detach() * micro.factor
                    pids.update(micro.batch["pid"].tolist())
                    used += micro.batch["index"].tolist() if micro.factor else []
                for parameter in session.state.model.parameters():
                    dist.all_reduce(parameter.grad, group=group)
                dist.all_reduce(losses, group=group)
                step.commit()
            line = {
                "pid": os.getpid(), "step": step.index, "dp": session.parallel.config.dp, "loss": losses.item(),
                "rank": session.parallel.rank, "used": used, "ids": list(session.sample_ids(step.index)),
                "loaders": sorted(pids), "generation": session.generation,
            }
            with open(log / f"steps-{os.getpid()}.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
            time.sleep(pause_s)
            if (log / "last").exists() and step.index >= int((log / "last").read_text()):
                break
