"""Opens a data parallel session whose `init` draws from torch's generators as they are."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import etc_agent as etc


def build(parallel: etc.ParallelContext) -> etc.TrainState:
    model = nn.Linear(4, 4)
    return etc.TrainState(model, torch.optim.SGD(model.parameters()), init=lambda state: state.model.reset_parameters())


def main() -> None:
    with etc.session(build, seed=5, global_batch=2) as session:
        for tensor, are_equal in ((session.state.model.weight.detach(), True), (torch.rand(4), False)):
            parts = [torch.empty_like(tensor) for _ in range(2)]
            dist.all_gather(parts, tensor)
            assert torch.equal(*parts) == are_equal
        print("replicas agree")


if __name__ == "__main__":
    main()
