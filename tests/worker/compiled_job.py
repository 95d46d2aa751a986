"""A job whose model is compiled in `TrainState.activate`; every worker has a compiler's cache of its own, as on a host
of its own.

The fault says how: ``{"backend": NAME}`` (None: not compiled), ``{"kind": "tp"}`` or ``{"kind": "fsdp"}`` (DTensors,
whose collectives are in the graphs), ``{"in_place": true}`` (`nn.Module.compile`).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import etc_agent as etc

WIDTH, MICROBATCH = 8, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


FAULT: dict[str, Any] = {}


def activate(state: etc.TrainState) -> nn.Module | None:
    backend = FAULT.get("backend", "inductor")
    if FAULT.get("in_place"):
        state.model.compile(backend=backend)
        return None
    return torch.compile(state.model, backend=backend) if backend else None


def build(parallel: etc.ParallelContext) -> etc.TrainState:
    model = Net()
    if FAULT.get("kind") == "tp":
        parallelize_module(model, parallel.mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if FAULT.get("kind") == "fsdp":
        fully_shard(model, mesh=parallel.mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return etc.TrainState(model, optimizer, init="module", activate=activate)


class Samples:
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(WIDTH, dtype=torch.float32) * (index % 97 + 1) * 0.1)


def main(log: Path, num_steps: int, pause_s: float, fault: dict[str, Any]) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(log / f"cache-{os.environ['LOCAL_RANK']}")
    from torch._dynamo.utils import counters

    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = fault.get("recompile_limit", 8)
    FAULT.update(fault)
    with etc.session(build, global_batch=12, timeout_s=600.0, switch_timeout_s=600.0) as session:
        data = Samples()
        for step in session.steps(num_steps):
            start, dp = time.perf_counter(), session.parallel.config.dp
            with step:
                losses = []
                batches = session.batch(data).split(MICROBATCH)
                for batch in batches:
                    losses.append(((session.model(batch) - torch.cos(batch)) ** 2).mean() / len(batches))
                    losses[-1].backward()
                if FAULT.get("kind") != "fsdp":
                    for parameter in session.state.model.parameters():
                        gradient = parameter.grad
                        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                        dist.all_reduce(local.div_(dp), group=session.parallel.mesh.get_group("dp"))
                loss = torch.stack(losses).detach().sum() / dp
                dist.all_reduce(loss, group=session.parallel.mesh.get_group("dp"))
                step.commit()
            line = {
                "step": step.index, "loss": loss.item(), "rank": session.parallel.rank,
                "generation": session.generation, "local_rank": os.environ["LOCAL_RANK"],
                "seconds": time.perf_counter() - start,
                "graphs": counters["stats"]["unique_graphs"], "hits": counters["inductor"]["fxgraph_cache_hit"],
                "misses": counters["inductor"]["fxgraph_cache_miss"],
                "joint_hits": counters["aot_autograd"]["autograd_cache_hit"],
                "joint_misses": counters["aot_autograd"]["autograd_cache_miss"],
            }
            with open(log / f"steps-{os.getpid()}.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
            time.sleep(pause_s)
            if (log / "last").exists() and step.index >= int((log / "last").read_text()):
                break
