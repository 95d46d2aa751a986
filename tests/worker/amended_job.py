"""A tiny job whose script changes what `build` made: see `ACTIONS`. Its layers train on their own, so that the weights
of a layer are the same bits in every pipeline, and those of one data parallel rank those of another.

`fault`: ``optimizer``, a name in `OPTIMIZERS`; ``actions``, pairs of step and name in `ACTIONS`; ``only_rank``, the one
rank that acts, all by default; ``migration``, the mode.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import etc_agent as etc

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
from optimizers_of_users import Lion, NumbersPerParameter, Quantised, SlowWeights

LAYERS, WIDTH = 4, 6

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD dampening": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, dampening=0.5),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "Lion": Lion,
    "numbers per parameter": NumbersPerParameter,
    "slow weights": SlowWeights,
    "quantised": Quantised,
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.num_calls = 0


class Stage(nn.Module):
    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): Layer() for layer in layers})


def build(parallel: etc.ParallelContext, optimizer: str) -> etc.TrainState:
    """Layer 1 is frozen, and the optimizer does not get the last one."""
    config = parallel.config
    if config.tp > 1:
        raise ValueError(f"{config}: this model has no tensor parallelism")
    stage = parallel.coordinate.pp
    model = Stage(range(stage * LAYERS // config.pp, (stage + 1) * LAYERS // config.pp))
    updated = []
    for name, layer in model.layers.items():
        layer.requires_grad_(name != "1")
        if name != str(LAYERS - 1):
            updated += list(layer.parameters())
    return etc.TrainState(model, OPTIMIZERS[optimizer](updated or [{"params": []}]), init="module")


def freeze(state: etc.TrainState) -> None:
    for name, layer in state.model.layers.items():
        if name == "0":
            layer.requires_grad_(False)
            layer.eval()


def unfreeze(state: etc.TrainState) -> None:
    for name, layer in state.model.layers.items():
        if name == "1":
            layer.requires_grad_(True)


def add_group(state: etc.TrainState) -> None:
    last = [layer for name, layer in state.model.layers.items() if name == str(LAYERS - 1)]
    state.optimizer.add_param_group({"params": [p for layer in last for p in layer.parameters()], "lr": 1 / 128})


def count(state: etc.TrainState) -> None:
    for layer in state.model.layers.values():
        layer.num_calls += 1


ACTIONS = {"freeze": freeze, "unfreeze": unfreeze, "add group": add_group, "count": count}


class Samples:
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(WIDTH, dtype=torch.float32) * (index % 97 + 1) * 0.1)


def train(state: etc.TrainState, parallel: etc.ParallelContext, batch: torch.Tensor) -> None:
    for name, layer in state.model.layers.items():
        loss = (layer.norm(layer.inner(batch)) - torch.cos(batch + int(name))).square().mean()
        if loss.requires_grad:
            (loss / parallel.config.dp).backward()
    if parallel.config.dp > 1:
        for param in state.model.parameters():
            # Of all, so that a rank alone may freeze some.
            gradient = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(gradient, group=parallel.mesh.get_group("dp"))


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def main(log: Path, num_steps: int, pause_s: float, fault: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    with etc.session(
        lambda parallel: build(parallel, fault["optimizer"]), global_batch=12, seed=7, timeout_s=60.0,
        switch_timeout_s=60.0, migration=fault.get("migration", "auto"),
    ) as session:
        data = Samples()
        for step in session.steps(num_steps):
            state = session.state
            with step:
                train(state, session.parallel, session.batch(data))
                step.commit()
            state.model.zero_grad()
            for at, action in fault["actions"]:
                if at == step.index and fault.get("only_rank") in (None, session.parallel.rank):
                    ACTIONS[action](state)
            line = {
                "step": step.index, "rank": session.parallel.rank, "generation": session.generation,
                "weights": {name: digest(param) for name, param in state.model.named_parameters()},
                "trainable": sorted(name for name, p in state.model.named_parameters() if p.requires_grad),
                "lr": [group["lr"] for group in state.optimizer.param_groups],
                "training": sorted(name for name, module in state.model.named_modules() if module.training),
            }
            with open(log / f"steps-{os.getpid()}.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
            time.sleep(pause_s)
            if (log / "last").exists() and step.index >= int((log / "last").read_text()):
                break
