"""Trains a model in a session of a fixed size that writes checkpoints.

    checkpoint_ranks.py MODEL CONFIG FOLDER DUMPS NUM_STEPS EVERY

MODEL is gpt (of scripts/), tiny, wide (tiny with more hidden units) or fsdp. Every rank dumps its shards and random
stream to DUMPS when it begins, as the side ``new``, and after the last step, as ``old``, and appends the loss of every
step to DUMPS/losses-RANK.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import fsdp_job
import tiny_job
from gpt.data import ByteSamples
from gpt.options import GptOptions
from gpt.training import build, train

import etc_agent as etc
from etc_agent.integrations.native import rng_state, shards_of
from etc_agent.state.boxes import whole
from etc_agent.state.layout import LogicalTensor, Shard
from etc_agent.worker.change.state.shard_dumps import dump_shards

GPT = GptOptions(
    layers=4, hidden=32, heads=4, sequence=32, steps=1000, global_batch=16, microbatch=2, warmup=2, clip=1.0,
    data=Path(__file__).parent,
)


def build_gpt(parallel: etc.ParallelContext) -> etc.TrainState:
    """With dropout wherever the model can have it, so that the random streams count."""
    return build(replace(GPT, dropout=0.1 if parallel.config.tp == 1 else 0.0), parallel)


def train_fsdp(state: etc.TrainState, parallel: etc.ParallelContext, batch: torch.Tensor) -> float:
    loss = ((state.model(batch) - torch.cos(batch)) ** 2).mean()
    loss.backward()
    return loss.item()


def train_tiny(state: etc.TrainState, parallel: etc.ParallelContext, batch: torch.Tensor) -> float:
    state.extras["own"].steps += 1
    state.extras["seen"].note([int(parallel.rank)], state.extras["own"].steps)
    torch.rand(parallel.rank + 1)
    return tiny_job.train(state, parallel, batch).item()


MODELS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[], Any], int]] = {
    "gpt": (build_gpt, train, lambda: ByteSamples(GPT.data, GPT.sequence, GPT.seed), GPT.global_batch),
    "tiny": (tiny_job.build, train_tiny, tiny_job.Samples, 12),
    "wide": (tiny_job.build, train_tiny, tiny_job.Samples, 12),
    "fsdp": (fsdp_job.build, train_fsdp, fsdp_job.Samples, 12),
}


def dump(session: etc.Session, folder: Path, side: str) -> None:
    shards = shards_of(session.state)
    at, stream = session.parallel.coordinate, rng_state(session.parallel.device)
    shape = tuple(stream.shape)
    shards[Shard(LogicalTensor(f"rng.pp{at.pp}.dp{at.dp}.tp{at.tp}", shape, "uint8", 1), whole(shape))] = stream
    dump_shards(str(folder), session.step, side, session.parallel.rank, shards)
    optimizer, scheduler = session.state.optimizer, session.state.scheduler
    host = {
        "lr": [group["lr"] for group in optimizer.param_groups],
        "scheduler": scheduler.last_epoch if scheduler is not None else None,
        "seen": sorted(session.state.extras["seen"].state_dict()) if "seen" in session.state.extras else [],
    }
    (folder / f"host-{session.step}-{side}-{session.parallel.rank}.json").write_text(json.dumps(host))


def main() -> None:
    model, config, folder, dumps, num_steps, every = sys.argv[1:]
    torch.set_num_threads(1)
    if model == "wide":
        tiny_job.FAULT["hidden"] = 24
    build_model, train_model, data, global_batch = MODELS[model]
    with etc.session(
        build_model, global_batch=global_batch, seed=7, parallel=config, timeout_s=60.0,
        checkpoint=etc.Checkpoint(folder, every_steps=int(every)),
    ) as session:
        samples = data()
        dump(session, Path(dumps), "new")
        for step in session.steps(int(num_steps)):
            with step:
                loss = train_model(session.state, session.parallel, session.batch(samples))
                step.commit()
            with open(Path(dumps) / f"losses-{session.parallel.rank}", "a") as file:
                file.write(json.dumps([step.index, loss]) + "\n")
        dump(session, Path(dumps), "old")


if __name__ == "__main__":
    main()
