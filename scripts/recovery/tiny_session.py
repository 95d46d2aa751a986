"""The tiny model with data parallelism in a session: what etc-run does with a loss."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from gpt.records import SampleLog, StepLog

import etc_agent as etc
from recovery.tiny_model import GLOBAL_BATCH, loss_of, make_model, samples


class Data:
    def __getitem__(self, index: int) -> torch.Tensor:
        return samples([index])[0]


def build(_: etc.ParallelContext) -> etc.TrainState:
    model = make_model()
    return etc.TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-3), init="module")


def train(state: etc.TrainState, parallel: etc.ParallelContext, batch: torch.Tensor) -> float:
    loss = loss_of(state.model, batch)
    loss.backward()
    for parameter in state.model.parameters():
        assert parameter.grad is not None
        parameter.grad /= parallel.config.dp
        dist.all_reduce(parameter.grad, group=parallel.mesh.get_group("dp"))
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-log", type=Path, required=True)
    parser.add_argument("--sample-log", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    log, taken = StepLog(arguments.step_log), SampleLog(arguments.sample_log)
    with etc.session(
        build, global_batch=GLOBAL_BATCH, record=lambda step, ids: taken.append(step, ids, session.parallel)
    ) as session:
        log.start()
        for step in session.steps(arguments.steps):
            with step:
                loss = train(session.state, session.parallel, session.batch(Data()))
                step.commit()
            if step.is_committed:
                log.step(step.index, loss, session.parallel)


if __name__ == "__main__":
    main()
