"""The latch that a loss closes, and what a step keeps so that it can be run again."""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from etc_agent.control.messages import Agreed
from etc_agent.integrations.native import TrainState
from etc_agent.worker.loss.latch import Latch, LatchClosedError, Seen
from etc_agent.worker.loss.step_start import StepStart
from etc_agent.worker.world.connections import Connections
from etc_agent.worker.world.stores import raw_group

CPU = torch.device("cpu")


def test_what_was_answered_is_final() -> None:
    latch = Latch()
    latch.record(Seen(1, 7))
    assert latch.close(1) == Seen(1, 7)
    with pytest.raises(LatchClosedError):
        latch.record(Seen(1, 8))
    assert latch.close(2) == Seen(1, 7)


def test_only_an_agreement_about_the_present_loss_opens_the_latch() -> None:
    latch = Latch()
    latch.record(Seen(1, 7))
    latch.close(1)
    latch.agree(early := Agreed(1, 1, 8))
    assert latch.await_agreed(lambda: False) == early
    latch.close(2)
    assert not latch.open(early, Seen(1, 8))
    assert latch.is_closed
    assert latch.close(2) == Seen(1, 8), "what was agreed on first has been done, and stays"
    latch.agree(early)
    latch.agree(late := Agreed(2, 1, 8))
    assert latch.await_agreed(lambda: False) == late
    assert latch.open(late, Seen(1, 8))
    assert latch.close(2) == Seen(1, 8)
    assert not latch.is_closed, "a Freeze that comes twice closes nothing"


class Counter:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("table", torch.zeros(3, 3))
        self.register_buffer("mean", torch.zeros(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table.add_(1.0)
        self.mean = self.mean * 0.9 + 1.0
        return self.norm(self.linear(x))


def test_a_step_that_is_run_again_finds_what_it_found_at_first() -> None:
    model, counter = Model(), Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainState(model, optimizer, extras={"counter": counter})
    start = StepStart(state, CPU)

    def draw() -> list[float]:
        return [torch.rand(1).item(), random.random(), float(np.random.rand())]

    def step() -> list[torch.Tensor]:
        optimizer.param_groups[0]["lr"] *= 2
        counter.seen.append(1)
        model(torch.rand(5, 4)).sum().backward()
        return [buffer.clone() for buffer in model.buffers()]

    for _ in range(3):
        start.take()
        step()
    start.take()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    lr, seen, state_of_torch = optimizer.param_groups[0]["lr"], list(counter.seen), torch.get_rng_state()
    first = [step(), draw()]
    start.restore()
    assert torch.equal(torch.get_rng_state(), state_of_torch)
    assert (optimizer.param_groups[0]["lr"], counter.seen) == (lr, seen)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())
    again = [step(), draw()]
    assert again[1] == first[1]
    assert all(torch.equal(one, other) for one, other in zip(again[0], first[0], strict=True))


def test_an_extra_that_cannot_be_read_does_not_stop_training(caplog: pytest.LogCaptureFixture) -> None:
    class Unreadable(Counter):
        def state_dict(self) -> dict[str, Any]:
            raise LookupError("not at hand")

    start = StepStart(TrainState(nn.Linear(1, 1), None, extras={"odd": Unreadable()}), CPU)
    start.take()
    start.restore()
    assert "extras['odd'] keeps what the step that is run again has made of it" in caplog.text


def test_a_cut_frees_those_that_wait_although_a_child_holds_the_sockets_open() -> None:
    connections, store = Connections(), dist.HashStore()
    groups: dict[int, dist.ProcessGroup] = {}
    failures: list[str] = []

    def make(rank: int) -> None:
        groups[rank] = raw_group(store, rank, 2, 60, connections)

    def wait_in_vain() -> None:
        try:
            groups[0].allreduce([torch.ones(1)]).wait()
        except RuntimeError as error:
            failures.append(str(error))

    together = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:  # it has inherited every socket, as a data loader's worker has
        os.read(reader, 1)
        os._exit(0)
    waiting = threading.Thread(target=wait_in_vain)
    waiting.start()
    connections.cut()
    waiting.join(30)
    os.write(writer, b"x")
    os.waitpid(child, 0)
    assert failures
