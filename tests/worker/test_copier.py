"""The copier: workers as objects of one process, each with a state, a gloo group and a thread of its own."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import etc_agent as etc
from etc_agent.control.redundancy import Redundancy, Scheme
from etc_agent.integrations.json_values import decode
from etc_agent.integrations.tensors import named_tensors
from etc_agent.parallel.config import Coordinate
from etc_agent.state.layout import Shard
from etc_agent.worker.redundancy import copier as copier_module
from etc_agent.worker.redundancy.copier import BUSY, Copier
from etc_agent.worker.redundancy.copy_set import ChangedError, CopySet
from etc_agent.worker.world.connections import Connections
from etc_agent.worker.world.stores import raw_group

CPU = torch.device("cpu")
TIMEOUT_S = 30.0


class Counter:
    """A script's own state of each rank."""

    rule = "per_rank"

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.count = state_dict["count"]


class Worker:
    """A rank that trains: its stage's layer is on no other rank, `shared` on all of them."""

    def __init__(self, rank: int, node: int, *, has_stage: bool) -> None:
        layers: dict[str, nn.Module] = {"shared": nn.Linear(2, 2)}
        if has_stage:
            layers[f"stage{rank}"] = nn.Linear(3, 5)
        self.model = nn.ModuleDict(layers)
        self.model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.counter = Counter()
        self.state = etc.TrainState(self.model, self.optimizer, extras={"counter": self.counter})
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.node, self.at = node, Coordinate(rank, 0, 0)
        self.history: dict[int, dict[str, torch.Tensor]] = {}
        self.copier: Copier

    def train(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.rand_like(parameter)
        self.model.seen += 1
        self.copier.await_copied()
        self.optimizer.step()
        self.counter.count += 1

    def now(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in named_tensors(self.state).items()}

    @property
    def newest(self) -> CopySet:
        assert self.copier.newest is not None
        return self.copier.newest


class Job:
    """Workers in step: a vote after every step, then the safe point."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.step = 0
        self.agreed = BUSY

    def advance(self) -> None:
        for worker in self.workers:
            worker.history[self.step] = worker.now()
            worker.copier.at_safe_point(worker.state, self.step, self.agreed)
        for worker in self.workers:
            worker.train()
        self.agreed = min(worker.copier.ballot for worker in self.workers)
        self.step += 1

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            self.advance()
            time.sleep(0.001)

    def complete(self) -> set[int]:
        """The steps of the workers' newest complete sets, -1 for none."""
        return {copies.step if (copies := worker.copier.newest) else -1 for worker in self.workers}


@contextmanager
def job(
    nodes: list[int], every: int, *, scheme: Scheme = Scheme.PEER, has_stages: bool = True
) -> Iterator[Job]:
    store = dist.HashStore()
    with ThreadPoolExecutor(len(nodes)) as pool:
        size = len(nodes)
        groups = list(pool.map(lambda rank: raw_group(store, rank, size, TIMEOUT_S, Connections()), range(size)))
    workers = [Worker(rank, node, has_stage=has_stages) for rank, node in enumerate(nodes)]
    for worker, group in zip(workers, groups, strict=True):
        worker.copier = Copier(group, worker.node, Redundancy(scheme, every), CPU, worker.at)
    try:
        yield Job(workers)
    finally:
        for worker in workers:
            worker.copier.close()


def kept_parts(copies: CopySet, number: int) -> dict[Shard, torch.Tensor]:
    """The parts in a kept block of one piece."""
    (places,) = copies.kept_layouts[number].pieces.values()
    return {place.part: place.tensor(copies.kept[number]) for place in places.places}


def test_all_ranks_copy_at_the_same_steps_and_keep_what_the_owners_had() -> None:
    with job([0, 0, 1, 1], every=4) as running:
        steps: list[int] = []
        while len(steps) < 4:
            running.until(lambda: len(new := running.complete()) == 1 and min(new) > max(steps, default=-1), "a set")
            (step,) = running.complete()
            steps.append(step)
            for worker in running.workers:
                copies = worker.newest
                shards = copies.layout.shards().items()
                held = {shard.tensor.name: place.tensor(copies.own) for shard, (place,) in shards}
                then = worker.history[step]
                assert set(then) == {name for name in held if not name.startswith("rng.")}
                assert all(torch.equal(held[name], tensor) for name, tensor in then.items())
                for number in copies.kept:
                    (owner,), parts = copies.kept_layouts[number].pieces, kept_parts(copies, number)
                    theirs = running.workers[owner]
                    assert theirs.node != worker.node
                    assert {part.tensor.name for part in parts} == {f"rng.pp{owner}.dp0.tp0"} | {
                        name for name in theirs.history[step] if f"stage{owner}" in name
                    }, "what every node has is not copied"
                    for part, tensor in parts.items():
                        if not part.tensor.name.startswith("rng."):
                            assert torch.equal(tensor, theirs.history[step][part.tensor.name])
                    counter = json.loads(copies.kept_values[owner])["extras"]["counter"]
                    assert decode(counter) == {"count": step}
            assert sorted(number for worker in running.workers for number in worker.newest.kept) == [0, 1, 2, 3]
        assert all(later - earlier >= 4 for earlier, later in pairwise(steps))


def test_at_every_moment_all_ranks_have_one_complete_set_in_common() -> None:
    with job([0, 1], every=1) as running:
        running.until(lambda: -1 not in running.complete(), "a copy set")
        for _ in range(300):
            running.advance()
            common = min(running.complete())
            assert all(worker.copier.of_step(common) is not None for worker in running.workers)
        assert common > 20


@pytest.mark.parametrize("scheme", [Scheme.PEER, Scheme.PARITY])
def test_restoring_a_set_gives_the_state_of_its_step_back_bit_for_bit(scheme: Scheme) -> None:
    with job([0, 1, 2], every=1000, scheme=scheme) as running:
        running.until(lambda: -1 not in running.complete(), "a copy set")
        (step,) = running.complete()
        worker = running.workers[0]
        worker.newest.restore(worker.state, CPU, worker.at)
        drawn, python, numpy = torch.rand(3), random.random(), np.random.random()
        for _ in range(3):
            running.advance()
        worker.optimizer.param_groups[0]["lr"] = 7.0
        worker.model.shared.weight.grad = torch.ones(2, 2)
        assert worker.counter.count > step
        worker.newest.restore(worker.state, CPU, worker.at)
        now = worker.now()
        assert all(torch.equal(now[name], tensor) for name, tensor in worker.history[step].items())
        assert (worker.counter.count, worker.optimizer.param_groups[0]["lr"]) == (step, 0.1)
        assert all(parameter.grad is None for parameter in worker.model.parameters())
        assert torch.equal(torch.rand(3), drawn)
        assert (random.random(), np.random.random()) == (python, numpy)


def test_a_rank_whose_tensors_change_has_all_ranks_plan_again() -> None:
    with job([0, 1, 2], every=1) as running:
        running.until(lambda: -1 not in running.complete(), "a copy set")
        worker = running.workers[1]
        before = worker.newest
        worker.model.register_buffer("late", torch.ones(4))
        change = running.step
        running.until(lambda: min(running.complete()) > change + 1, "a copy set of the new tensors")
        assert "model.late" in {shard.tensor.name for shard in worker.newest.layout.manifest}
        kept = {part.tensor.name for each in running.workers for number in each.newest.kept
                for part in kept_parts(each.newest, number)}
        assert "model.late" in kept
        with pytest.raises(ChangedError, match=r"^model\.late: added"):
            before.restore(worker.state, CPU, worker.at)


def test_where_every_box_has_a_replica_no_memory_and_no_time_is_spent() -> None:
    with job([0, 1], every=1, has_stages=False) as running:
        running.until(lambda: all(worker.copier.plan is not None for worker in running.workers), "a plan")
        for _ in range(20):
            running.advance()
        assert running.complete() == {-1}
        assert {worker.copier.ballot for worker in running.workers} == {BUSY}


def test_without_memory_for_copies_on_one_worker_none_are_made_and_the_reason_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(copier_module, "free_bytes", lambda device: 1000)
    with job([0, 1], every=1) as running:
        running.until(lambda: "bytes of host memory for them and has 1,000 free" in caplog.text, "the reason")
        for _ in range(20):
            running.advance()
        assert running.complete() == {-1}
        assert [record.levelname for record in caplog.records] == ["ERROR"]
