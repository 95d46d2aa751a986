"""The loader and streams over the job's sequence of samples."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset

import etc_agent as etc
from etc_agent.worker.data.batch import Place
from etc_agent.worker.data.division import GlobalBatch
from etc_agent.worker.data.loader import Loader
from etc_agent.worker.data.stream import Stream

CPU = torch.device("cpu")
WEIGHTED = GlobalBatch(12, "weighted")


class Numbers(Dataset):
    """Sample i is (i, the process that made it, a random number)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.rand(()).item() + random.random() + numpy.random.random()
        return {"index": index, "pid": os.getpid(), "noise": noise}


def loader(size: int = 100, **arguments: Any) -> Loader:
    defaults: dict[str, Any] = {
        "batch_size": None, "shuffle": None, "drop_last": True, "num_workers": 0, "collate_fn": None, "seed": 3,
        "options": {}, "present": lambda: place(0),
    }
    return Loader(Numbers(size), 12, **{**defaults, **arguments})


def place(step: int, rank: int = 0, num_ranks: int = 1, samples: GlobalBatch = WEIGHTED) -> Place:
    return Place(samples, step, rank, num_ranks, CPU)


def indices(batch: dict[str, torch.Tensor]) -> list[int]:
    return batch["index"].tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_change_of_dp_loses_and_repeats_nothing_and_the_worker_processes_stay(num_workers: int) -> None:
    data = loader(num_workers=num_workers)
    places = [place(0), place(1), place(2, 1, 3), place(3, 1, 3), place(3, 1, 3), place(4, 0, 2), place(5, 1, 2)]
    pids = set()
    for at in places:
        batch = at.batch(data)
        assert indices(batch) == [i % 96 for i in at.ids()]
        pids.update(batch["pid"].tolist())
    assert len(pids) == max(num_workers, 1)
    assert (os.getpid() in pids) is (num_workers == 0)


def test_an_epoch_takes_every_sample_once_in_an_order_of_its_own() -> None:
    data = loader(size=26, shuffle=5)
    assert data.steps_per_epoch == 2
    epochs = [[i for step in (2 * e, 2 * e + 1) for i in indices(place(step).batch(data))] for e in range(3)]
    assert all(len(set(epoch)) == 24 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [data.epoch(step) for step in range(5)] == [0, 0, 1, 1, 2]
    again = loader(size=26, shuffle=5)
    parts = [indices(place(3, rank, 3).batch(again)) for rank in range(3)]
    assert [i for part in parts for i in part] == epochs[1][12:]


def test_without_drop_last_the_next_epoch_begins_in_the_middle_of_a_step() -> None:
    data = loader(size=18, drop_last=False)
    assert indices(place(1).batch(data)) == [*range(12, 18), *range(6)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_augmentation_depends_on_the_sample_alone_and_leaves_the_training_streams(num_workers: int) -> None:
    whole = place(4).batch(loader(num_workers=2))["noise"].tolist()
    data = loader(num_workers=num_workers)
    place(0).batch(data)
    torch.manual_seed(1)
    random.seed(1)
    expected = torch.rand(2).tolist(), random.random()
    torch.manual_seed(1)
    random.seed(1)
    parts = [place(4, rank, 5).batch(data)["noise"].tolist() for rank in range(5)]
    assert [noise for part in parts for noise in part] == whole
    assert (torch.rand(2).tolist(), random.random()) == expected


def test_microbatches_come_through_the_loader_too() -> None:
    data = loader(batch_size=2, num_workers=1)
    for step, rank, num_ranks in ((0, 0, 1), (1, 4, 5), (2, 4, 5), (2, 1, 2)):
        at = place(step, rank, num_ranks)
        micros = list(at.microbatches(data, 2, "mean"))
        assert [i for micro in micros if micro.factor for i in indices(micro.batch)] == list(at.ids())
        assert sum(micro.factor for micro in micros) == pytest.approx(len(at.ids()) * num_ranks / 12)
    with pytest.raises(ValueError, match=r"^the loader has batch_size=2, so it gives microbatches"):
        place(3).batch(data)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterated_over_in_a_step_it_gives_microbatches_of_one_size(num_workers: int) -> None:
    at = place(0)
    data = loader(batch_size=4, num_workers=num_workers, present=lambda: at)
    for at, sizes in ((place(0, 1, 2), [3, 3]), (place(1), [4, 4, 4]), (place(2, 3, 4), [3]), (place(3, 2, 3), [4])):
        batches = list(data)
        assert [len(indices(batch)) for batch in batches] == sizes
        assert len(data) == len(sizes)
        assert [i for batch in batches for i in indices(batch)] == list(at.ids())
    whole = loader(present=lambda: place(1, 1, 3))
    assert [indices(batch) for batch in whole] == [[16, 17, 18, 19]]
    at = place(0, 1, 5)
    with pytest.raises(ValueError, match=r"a global batch of 12 has no equal parts for dp=5: use session.microbatches"):
        next(iter(data))


def test_the_order_is_that_of_a_distributed_sampler_with_the_same_seed() -> None:
    data = loader(size=24, shuffle=5)
    for epoch in range(2):
        samplers = [DistributedSampler(Numbers(24), 3, rank, seed=5) for rank in range(3)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        theirs = [list(sampler) for sampler in samplers]
        for step in range(2):
            ours = indices(place(2 * epoch + step).batch(data))
            assert sorted(ours) == sorted(i for order in theirs for i in order[4 * step : 4 * step + 4])


def test_data_that_cannot_be_repositioned_is_refused_with_the_remedy() -> None:
    class Endless(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

    session = etc.session(lambda parallel: None, global_batch=12)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match=r"not Endless: .* use session.stream\(factory\)"):
        session.loader(Endless())
    with pytest.raises(TypeError, match=r"not DataLoader; a DataLoader or an iterator cannot be repositioned"):
        place(0).batch(torch.utils.data.DataLoader(Numbers(4)))
    with pytest.raises(ValueError, match=r"has 5 samples, fewer than one global batch of 12"):
        session.loader(Numbers(5))


def test_a_stream_starts_again_at_the_first_sample_that_was_not_used() -> None:
    starts = []

    def factory(start: int, rank: int, size: int) -> Iterator[int]:
        starts.append((start, rank, size))
        return iter(range(start + rank, 60, size))

    stream, samples = Stream(factory), GlobalBatch(12)
    seen = [place(step, 1, 2, samples).batch(stream) for step in (0, 1)]
    assert [batch.tolist() for batch in seen] == [list(range(1, 12, 2)), list(range(13, 24, 2))]
    assert place(2, 1, 3, samples).batch(stream).tolist() == [25, 28, 31, 34]
    assert starts == [(0, 1, 2), (24, 1, 3)]
    with pytest.raises(IndexError, match=r"factory\(60, 1, 3\) gave 0 of the 4 samples"):
        place(5, 1, 3, samples).batch(stream)
