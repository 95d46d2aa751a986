"""A DistributedDataParallel job that wraps, hooks and, on request, compiles its model in `TrainState.activate`.

The fault says what goes wrong: ``{"wrap": KIND}`` (a key of `WRAPS`), ``{"die_activating": [GENERATION, LOCAL RANK]}``.
"""

from __future__ import annotations

import gc
import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deaths
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import etc_agent as etc

WIDTH, SEED, GLOBAL_BATCH = 6, 3, 12
FAULT: dict[str, Any] = {}
ACTIVATIONS: list[dict[str, Any]] = []
HOOKED: list[int] = []
"""Generations whose hooks on the first parameter have run in the step under way."""
KEPT: list[Any] = []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(2 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))))


def wrapped(model: nn.Module, parallel: etc.ParallelContext) -> nn.Module:
    wrapping = DistributedDataParallel(
        model, process_group=parallel.mesh.get_group("dp"), bucket_cap_mb=0.0005,
        gradient_as_bucket_view=FAULT.get("as_bucket_view", False),
    )
    if FAULT.get("comm_hook"):
        wrapping.register_comm_hook(None, allreduce_hook)
    return wrapping


def add_a_parameter(model: nn.Module, parallel: etc.ParallelContext) -> nn.Module:
    model.extra = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    return model


def fail(model: nn.Module, parallel: etc.ParallelContext) -> nn.Module:
    if parallel.generation == FAULT.get("fails_in", 1):
        raise LookupError("there is no such compiler")
    return wrapped(model, parallel)


WRAPS: dict[str, Callable[[nn.Module, etc.ParallelContext], nn.Module]] = {
    "ddp": wrapped, "add": add_a_parameter, "fail": fail,
}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Of those with a state, one that does not amplify roundings: under AdamW the order in which gradients are added
    shows in the sixth decimal after 250 steps, here in the eleventh after 1,200."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def build(parallel: etc.ParallelContext) -> etc.TrainState:
    model = Net()
    optimizer = optimizer_of(model)

    def activate(state: etc.TrainState) -> nn.Module:
        ACTIVATIONS.append({
            "generation": parallel.generation, "thread": threading.current_thread().name,
            "devices": sorted({each.device.type for each in state.model.parameters()}), "world": dist.get_world_size(),
        })
        if FAULT.get("die_activating") == [parallel.generation, int(os.environ.get("LOCAL_RANK", "0"))]:
            deaths.die()
        torch.rand(5)  # draws from the stream, which no change must show
        state.model.up.weight.register_post_accumulate_grad_hook(lambda _: HOOKED.append(parallel.generation))
        return WRAPS[FAULT.get("wrap", "ddp")](state.model, parallel)

    return etc.TrainState(model, optimizer, init="module", activate=activate)


class Samples:
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(WIDTH, dtype=torch.float64) * (index % 97 + 1) * 0.1)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return ((model(batch) - torch.cos(batch)) ** 2).mean()


def num_wrapped() -> int:
    gc.collect()
    return sum(type(each) is DistributedDataParallel for each in gc.get_objects())


def main(log: Path, num_steps: int, pause_s: float, fault: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    FAULT.update(fault)
    random.seed(0)
    with etc.session(
        build, global_batch=GLOBAL_BATCH, seed=SEED, timeout_s=60.0, switch_timeout_s=60.0, loss_timeout_s=30.0,
        migration=fault.get("migration", "auto"),
    ) as session:
        data = Samples()
        for step in session.steps(num_steps):
            HOOKED.clear()
            with step:
                first, last = session.batch(data).chunk(2)
                with session.model.no_sync():
                    (loss_of(session.model, first) / 2).backward()
                loss = loss_of(session.model, last) / 2
                loss.backward()
                step.commit()
            if not step.is_committed:
                continue
            if fault.get("keeps_old") and session.model not in KEPT:
                KEPT.append(session.model)
            if fault.get("evaluates"):
                session.model.eval()
                with torch.no_grad():
                    session.model(first)
                session.model.train()
            model = session.state.model
            line = {
                "step": step.index, "rank": session.parallel.rank, "dp": session.parallel.config.dp,
                "generation": session.generation, "pid": os.getpid(), "hooked": sorted(set(HOOKED)),
                "activations": ACTIVATIONS, "weight": model.down.weight.flatten().tolist(),
                "mean": model.norm.running_mean.tolist(), "wrapped": num_wrapped() if fault.get("counts") else 0,
                "drawn": torch.rand(1).item(), "is_raw": session.model is model,
            }
            with open(log / f"steps-{os.getpid()}.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
            time.sleep(pause_s)
            if (log / "last").exists() and step.index >= int((log / "last").read_text()):
                break
