"""The training job that chaos.py torments: small, but with every axis of parallelism, checkpoints and a full account.

Each layer learns a target of its own, so pipeline stages exchange nothing and the loss is one function under every
config. Each rank writes a JSON line per step: what it trained on, and two counters that are part of the state. These
tell whether the state in use has seen every step exactly once, whatever it went through.

    job.py FOLDER GLOBAL_BATCH PAUSE_S     until FOLDER/last holds the index of the last step
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import etc_agent as etc
from etc_agent.integrations.native import shards_of

NUM_LAYERS, WIDTH, HIDDEN = 4, 8, 12
CHECKPOINT_EVERY = 10
_KEPT = 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.down(torch.tanh(self.up(x)))


class Stage(nn.Module):
    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): Layer() for layer in layers})


class Data:
    """Sample i of an endless sequence."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(WIDTH, dtype=torch.float32) * (index % 97 + 1) * 0.1)


class Checkpoints:
    """Whole tensors by name, in one file per checkpoint, readable under any config.

    A file's name begins with the generation that wrote it: what a worker that should be gone may still write never
    counts as newer.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, state: etc.TrainState) -> int:
        """Fill `state` from the newest, or with initial values. Collective. Returns the step to go on with."""
        newest = [max(self._files(), default=None)]
        dist.broadcast_object_list(newest, src=0)
        if newest[0] is None:
            _initialise(state)
            return 0
        step, whole = torch.load(newest[0])
        for shard, local in shards_of(state).items():
            local.copy_(whole[shard.tensor.name][_slices(shard.box)])
        return int(step)

    def save(self, state: etc.TrainState, step: int, generation: int) -> None:
        """Write the state before step `step`. Collective."""
        mine = [(shard.tensor, shard.box, local.clone()) for shard, local in shards_of(state).items()]
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        if dist.get_rank() != 0:
            return
        whole: dict[str, torch.Tensor] = {}
        for tensor, box, local in (part for rank in parts for part in rank):
            whole.setdefault(tensor.name, local.new_empty(tensor.shape))[_slices(box)] = local
        path = self._folder / f"checkpoint-{generation:08d}-{step:08d}.pt"
        torch.save((step, whole), path.with_suffix(f".{os.getpid()}"))
        path.with_suffix(f".{os.getpid()}").rename(path)
        for old in sorted(self._files())[:-_KEPT]:
            old.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return list(self._folder.glob("checkpoint-*.pt"))


def _slices(box: Any) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(box.offset, box.shape, strict=True))


def _initialise(state: etc.TrainState) -> None:
    """Weights as a function of name and position, whatever the sharding."""
    for shard, local in shards_of(state).items():
        if not shard.tensor.name.startswith("model."):
            continue
        if not local.is_floating_point():
            local.zero_()
        else:
            generator = torch.Generator().manual_seed(sum(shard.tensor.name.encode()))
            local.copy_((torch.rand(shard.tensor.shape, generator=generator) - 0.5)[_slices(shard.box)])


def build(parallel: etc.ParallelContext, checkpoints: Checkpoints) -> etc.TrainState:
    pp, tp, stage = parallel.config.pp, parallel.config.tp, parallel.coordinate.pp
    if HIDDEN % tp or pp > NUM_LAYERS:
        raise ValueError(f"{parallel.config}: {NUM_LAYERS} layers of {HIDDEN} hidden units cannot be cut so")
    model = Stage(range(stage * NUM_LAYERS // pp, (stage + 1) * NUM_LAYERS // pp))
    if tp > 1:
        plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
        parallelize_module(model, parallel.mesh["tp"], plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return etc.TrainState(model, optimizer, init=checkpoints.load)


def train(state: etc.TrainState, parallel: etc.ParallelContext, batch: torch.Tensor) -> float:
    """One forward and backward pass. Returns the loss over the whole job."""
    loss = torch.zeros(())
    for name, layer in state.model.layers.items():
        loss = loss + ((layer(batch) - torch.cos(batch + int(name))) ** 2).mean()
    (loss / parallel.config.dp).backward()
    if parallel.config.dp > 1:
        for parameter in state.model.parameters():
            gradient = parameter.grad
            dist.all_reduce(
                gradient.to_local() if isinstance(gradient, DTensor) else gradient,
                group=parallel.mesh.get_group("dp"),
            )
    whole = loss.detach() / (parallel.config.dp * parallel.config.tp)
    dist.all_reduce(whole)
    return whole.item()


def _counts(state: etc.TrainState) -> tuple[list[int], list[int]]:
    """How many steps the state has been through: by the model's counters, and by the optimizer's."""
    seen = {int(layer.seen) for layer in state.model.layers.values()}
    updates = {int(entry["step"]) for entry in state.optimizer.state.values()}
    return sorted(seen), sorted(updates)


def main(folder: Path, global_batch: int, pause_s: float) -> None:
    torch.set_num_threads(1)
    checkpoints = Checkpoints(folder)
    ids: list[int] = []
    loss = 0.0
    with (
        open(folder / f"steps-{os.getpid()}-{time.time_ns()}.jsonl", "a", buffering=1) as log,
        etc.session(
            lambda parallel: build(parallel, checkpoints), global_batch=global_batch, timeout_s=60.0,
            switch_timeout_s=60.0, record=lambda _, seen: ids.__setitem__(slice(None), seen),
        ) as session,
    ):
        for step in session.steps(1 << 30):
            with step:
                if step.index % CHECKPOINT_EVERY == 0:
                    checkpoints.save(session.state, step.index, session.generation)
                loss = train(session.state, session.parallel, session.batch(Data()))
                step.commit()
            seen, updates = _counts(session.state)
            line = {
                "step": step.index, "generation": session.generation, "config": str(session.parallel.config),
                "rank": session.parallel.rank, "dp": session.parallel.coordinate.dp, "ids": ids, "loss": loss,
                "seen": seen, "updates": updates, "pid": os.getpid(), "time": time.time(),
                "is_retried": not step.is_committed,
            }
            log.write(json.dumps(line) + "\n")
            if not step.is_committed:
                continue
            if (folder / "last").exists() and step.index >= int((folder / "last").read_text()):
                break
            time.sleep(pause_s)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
