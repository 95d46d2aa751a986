"""An optimizer whose step() communicates is named, since a loss in it would tear the update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from etc_agent.adapters.native import Native
from etc_agent.integrations.train_state import TrainState


class Spreading(torch.optim.SGD):
    """As ZeRO-1 does: each rank updates a part of the parameters, and sends it to the others."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                dist.broadcast(param.detach(), 0)


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def updated(optimizer: type[torch.optim.SGD], num_steps: int) -> None:
    model = nn.Linear(2, 2)
    state = TrainState(model, optimizer(model.parameters(), lr=0.1))
    native = Native()
    for _ in range(num_steps):
        model(torch.ones(1, 2)).sum().backward()
        assert native.prepare(state)
        native.apply(state, ok=True)
        native.publish(state)


@pytest.mark.usefixtures("world")
def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    updated(Spreading, 3)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "Spreading.step() communicates with other workers"
    ]


@pytest.mark.usefixtures("world")
def test_a_local_update_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    updated(torch.optim.SGD, 2)
    assert not caplog.records
