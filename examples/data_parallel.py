"""A whole elastic training script: a small network, data parallelism by hand, any number of workers.

    etc-run --standalone --nproc-per-node 4 examples/data_parallel.py
    etcdctl --endpoints HOST:PORT put /etc-run/RUN_ID/control/scale 2       # etc-run prints address and run id
    torchrun --nproc-per-node 4 examples/data_parallel.py                   # the same at a fixed size
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import etc_agent as etc

STEPS, GLOBAL_BATCH, WIDTH = 20_000, 24, 64


def build(parallel: etc.ParallelContext) -> etc.TrainState:
    """This rank's model and optimizer, under the meta device. Data parallel alone: the other degrees are refused."""
    if parallel.config.tp > 1 or parallel.config.pp > 1:
        raise ValueError(f"{parallel.config}: this model is data parallel; pp and tp must be 1")
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    return etc.TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-3), init="module")


class Samples:
    """Sample i, for any i: an input with its sum of sines."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x.sin().sum(dim=0, keepdim=True)


def train(state: etc.TrainState, parallel: etc.ParallelContext, batch: list[torch.Tensor]) -> torch.Tensor:
    """The mean loss over the global batch; gradients are left as those of that mean."""
    inputs, targets = batch
    loss = nn.functional.mse_loss(state.model(inputs), targets) / parallel.config.dp
    loss.backward()
    for parameter in state.model.parameters():
        dist.all_reduce(parameter.grad)
    whole = loss.detach()
    dist.all_reduce(whole)
    return whole


def main() -> None:
    torch.set_num_threads(1)
    data = Samples()
    with etc.session(build, global_batch=GLOBAL_BATCH, seed=0) as session:
        for step in session.steps(STEPS):
            with step:
                loss = train(session.state, session.parallel, session.batch(data))
                step.commit()
            if session.parallel.rank == 0 and step.index % 200 == 0:
                print(f"step {step.index:5d}  loss {loss.item():.4f}  {session.parallel.config}", flush=True)


if __name__ == "__main__":
    main()
