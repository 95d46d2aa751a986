"""A job of which workers are killed at named points (`deaths`): each step's state is written down, as a digest.

The fault says which: ``{"model": KIND, "die": POINT, "slot": INDEX, "at": STEP}``. With ``{"gates": [STEP, ...]}`` the
workers wait before the vote of those steps, for a test to open them; with ``{"uncut": INDEX}`` no connection of that
worker can be cut.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import deaths
import torch
import torch.distributed as dist
from gpt import training
from gpt.data import ByteSamples
from gpt.options import GptOptions
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import etc_agent as etc
from etc_agent.integrations.native import shards_of
from etc_agent.worker.world.connections import Connections

WIDTH = 16
Train = Callable[[etc.TrainState, etc.ParallelContext, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """Draws random numbers in training, and writes to buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.tanh(self.norm(self.up(x)))))


class Cursor:
    """State of the script that every step changes, before its vote."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.read = state_dict["read"]


class Plain:
    """Gradients are averaged by hand."""

    @staticmethod
    def build(parallel: etc.ParallelContext) -> etc.TrainState:
        model = nn.Sequential(*(Block() for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return etc.TrainState(model, optimizer, extras={"cursor": Cursor()}, init="module")

    def train(self, state: etc.TrainState, parallel: etc.ParallelContext, batch: torch.Tensor) -> torch.Tensor:
        loss = ((state.model(batch) - torch.cos(batch)) ** 2).mean() / parallel.config.dp
        loss.backward()
        for parameter in state.model.parameters():
            dist.all_reduce(parameter.grad)
        return loss.detach()


class Even(Plain):
    """Draws no random numbers, so that a lost random stream changes nothing."""

    @staticmethod
    def build(parallel: etc.ParallelContext) -> etc.TrainState:
        state = Plain.build(parallel)
        for block in state.model:
            block.drop.p = 0.0
        return state


class Catching(Even):
    """A script that handles the errors of its collectives itself, and commits the step in any case."""

    def train(self, state: etc.TrainState, parallel: etc.ParallelContext, batch: torch.Tensor) -> torch.Tensor:
        try:
            return super().train(state, parallel, batch)
        except RuntimeError:
            return torch.zeros(())


class Ddp(Plain):
    """DistributedDataParallel, with a bucket for each block and less."""

    def __init__(self) -> None:
        self._wrapped: tuple[nn.Module, nn.Module] | None = None

    def train(self, state: etc.TrainState, parallel: etc.ParallelContext, batch: torch.Tensor) -> torch.Tensor:
        if self._wrapped is None or self._wrapped[0] is not state.model:
            self._wrapped = state.model, DistributedDataParallel(state.model, bucket_cap_mb=0.001)
        loss = ((self._wrapped[1](batch) - torch.cos(batch)) ** 2).mean()
        loss.backward()
        return loss.detach()


class Fsdp:
    """FSDP2 with replicas: sharded over the axis tp, replicated over dp."""

    @staticmethod
    def build(parallel: etc.ParallelContext) -> etc.TrainState:
        model = nn.Sequential(*(Block() for _ in range(4)))
        for block in model:
            fully_shard(block, mesh=parallel.mesh["dp", "tp"], reshard_after_forward=False)
        fully_shard(model, mesh=parallel.mesh["dp", "tp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return etc.TrainState(model, optimizer, extras={"cursor": Cursor()}, init="module")

    def train(self, state: etc.TrainState, parallel: etc.ParallelContext, batch: torch.Tensor) -> torch.Tensor:
        loss = ((state.model(batch) - torch.cos(batch)) ** 2).mean()
        loss.backward()
        return loss.detach()


class GptJob:
    """Pipeline stages with 1F1B, tensor and data parallelism."""

    OPTIONS = GptOptions(
        layers=4, hidden=24, heads=12, sequence=16, global_batch=12, microbatch=1, steps=1000, warmup=5,
        data=Path(__file__).parent,
    )

    def __init__(self) -> None:
        self.build = partial(training.build, self.OPTIONS)
        self.samples = ByteSamples(self.OPTIONS.data, self.OPTIONS.sequence, self.OPTIONS.seed)

    def train(self, state: etc.TrainState, parallel: etc.ParallelContext, batch: torch.Tensor) -> torch.Tensor:
        return torch.tensor(training.train(state, parallel, batch) or 0.0)


KINDS = {"plain": Plain, "even": Even, "catching": Catching, "ddp": Ddp, "fsdp": Fsdp, "gpt": GptJob}


class Samples:
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(WIDTH, dtype=torch.float32) * (index % 97 + 1) * 0.1)


def digest(state: etc.TrainState) -> str:
    """Of every tensor that this rank holds, and of the script's own state."""
    found = hashlib.sha256()
    for shard, local in sorted(shards_of(state).items(), key=lambda item: item[0].tensor.name):
        found.update(f"{shard.tensor.name} {shard.box}".encode() + local.contiguous().numpy().tobytes())
    found.update(repr(state.extras["cursor"].state_dict()).encode() if "cursor" in state.extras else b"")
    return found.hexdigest()


def refuse_to_update() -> None:
    raise RuntimeError("the update is wrong")


def wait_for_gate(log: Path, step: int) -> None:
    (log / f"at-{step}-{os.getpid()}").touch()
    while not (log / f"open-{step}").exists():
        time.sleep(0.005)


def main(log: Path, num_steps: int, pause_s: float, fault: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    kind = KINDS[fault["model"]]()
    is_mortal = os.environ["LOCAL_RANK"] == str(fault.get("slot"))
    if is_mortal and fault.get("die", deaths.IN_A_STEP[0]) not in deaths.IN_A_STEP:
        deaths.die_in_a_change(fault["die"])
    if os.environ["LOCAL_RANK"] == str(fault.get("uncut")):
        Connections.cut = lambda self: 0  # type: ignore[method-assign]
    with etc.session(
        kind.build, global_batch=12, seed=7, timeout_s=60.0, switch_timeout_s=60.0, loss_timeout_s=30.0,
        migration=fault.get("migration", "auto"), abort_timeout_s=fault.get("abort_timeout_s", 60.0),
    ) as session:
        data = getattr(kind, "samples", None) or Samples()
        for step in session.steps(num_steps):
            state = session.state
            dies = is_mortal and fault.get("at") == step.index and session.generation == 1
            if is_mortal and fault.get("raise_in_optimizer") == step.index:
                state.optimizer.step = refuse_to_update
            with step, deaths.dying_in(fault["die"], state) if dies else nullcontext():
                if "cursor" in state.extras:
                    state.extras["cursor"].read.append(step.index)
                loss = kind.train(state, session.parallel, session.batch(data))
                if step.index in fault.get("gates", ()):
                    wait_for_gate(log, step.index)
                step.commit()
            if not step.is_committed:
                continue
            if "evaluates_after" in fault:
                with session.guarded() as guarded:
                    if is_mortal and step.index == fault["evaluates_after"]:
                        deaths.die()
                    for _ in range(3):
                        dist.all_reduce(torch.ones(1))
                with open(log / f"evaluations-{os.getpid()}", "a") as file:
                    file.write(f"{step.index} {guarded.is_complete}\n")
            line = {
                "step": step.index, "rank": session.parallel.rank, "generation": session.generation,
                "loss": loss.item(), "digest": digest(session.state), "pid": os.getpid(),
                "config": str(session.parallel.config),
            }
            with open(log / f"steps-{os.getpid()}.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
            if is_mortal and fault.get("die_after") == step.index:
                deaths.die()
            time.sleep(pause_s)
