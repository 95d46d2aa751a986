"""Batches and microbatches of samples on the device, from whatever the script gives: data that is indexed by sample
number, a `Loader`, or a `Stream`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate

from etc_agent.worker.data.division import GlobalBatch, Part, Reduction, equal_parts, parts
from etc_agent.worker.data.loader import Loader
from etc_agent.worker.data.stream import Stream


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A part of a dp rank's samples of a step. `batch`: on the device; `ids`: the numbers of its samples. `factor`:
    what the mean loss over it is multiplied by before the backward pass. `is_last`: of the step."""

    batch: Any
    ids: Sequence[int]
    factor: float
    is_last: bool


@dataclass(frozen=True, slots=True)
class Place:
    """What a dp rank takes samples for: rank `rank` of `num_ranks` in `step`, to be put on `device`."""

    samples: GlobalBatch
    step: int
    rank: int
    num_ranks: int
    device: torch.device

    def ids(self) -> range:
        return self.samples.ids(self.step, self.rank, self.num_ranks)

    def batch(self, data: Any) -> Any:
        """All samples of this rank in this step, as one batch."""
        if isinstance(data, Loader):
            if data.batch_size is not None:
                raise ValueError(
                    f"the loader has batch_size={data.batch_size}, so it gives microbatches: use session.microbatches("
                    "loader), or leave batch_size out"
                )
            steps = itertools.count(self.step + 1)
            following = (self.samples.ids(step, self.rank, self.num_ranks) for step in steps)
            return _to_device(data.fetch(self.ids(), lambda: following), self.device)
        if isinstance(data, Stream):
            if self.samples.division != "equal":
                raise ValueError("session.stream needs division='equal'; use session.loader, which takes any dp")
            start = self.step * self.samples.size
            return _stacked(data.take(start, self.samples.size, self.rank, self.num_ranks), self.device)
        return batch_of(data, self.ids(), self.device)

    def microbatches(self, data: Any, size: int, reduction: Reduction) -> Iterator[Microbatch]:
        """This rank's samples of this step in microbatches of at most `size`; as many on every rank."""
        if isinstance(data, Stream):
            raise TypeError("session.microbatches takes data by sample number or a loader; cut session.batch(stream)")

        def parts_of(step: int) -> Iterator[Part]:
            return parts(self.samples, step, self.rank, self.num_ranks, size)

        for part, following in _with_following(parts_of, self.step):
            batch = data.fetch(part.ids, following) if isinstance(data, Loader) else None
            batch = batch_of(data, part.ids, self.device) if batch is None else _to_device(batch, self.device)
            factor = part.factor(self.samples.size, self.num_ranks, reduction)
            yield Microbatch(batch, part.ids, factor, part.is_last)

    def batches(self, loader: Loader) -> Iterator[Any]:
        """This rank's samples of this step in microbatches of one size; as many on every rank."""
        for part, following in _with_following(partial(self._equal_parts, loader), self.step):
            yield _to_device(loader.fetch(part.ids, following), self.device)

    def num_batches(self, loader: Loader) -> int:
        """How many `batches` gives."""
        return sum(1 for _ in self._equal_parts(loader, self.step))

    def _equal_parts(self, loader: Loader, step: int) -> Iterator[Part]:
        size = loader.batch_size or self.samples.size
        return equal_parts(self.samples, step, self.rank, self.num_ranks, size)


_PartsOf = Callable[[int], Iterator[Part]]


def _with_following(parts_of: _PartsOf, step: int) -> Iterator[tuple[Part, Callable[[], Iterable[range]]]]:
    """The parts of `step`, each with what gives the samples of those after it."""
    own = list(parts_of(step))
    for number, part in enumerate(own):
        yield part, partial(_following, own[number + 1 :], parts_of, step + 1)


def _following(rest: list[Part], parts_of: _PartsOf, step: int) -> Iterator[range]:
    """The samples of the parts `rest`, then those of all steps from `step` on."""
    later = itertools.chain.from_iterable(map(parts_of, itertools.count(step)))
    return (part.ids for part in itertools.chain(rest, later))


def batch_of(data: Any, ids: Sequence[int], device: torch.device) -> Any:
    """``data[i]`` for all `ids`, stacked, on `device`. Samples may be anything that `default_collate` knows."""
    return _stacked([_sample(data, i) for i in ids], device)


def _stacked(samples: list[Any], device: torch.device) -> Any:
    if all(isinstance(sample, torch.Tensor) for sample in samples):
        return torch.stack(samples).to(device, non_blocking=True)
    return _to_device(default_collate(samples), device)


def _sample(data: Any, index: int) -> Any:
    if not hasattr(data, "__getitem__"):
        raise TypeError(
            f"session.batch(data) takes data[i], session.loader(...) or session.stream(...), not "
            f"{type(data).__name__}; a DataLoader or an iterator cannot be repositioned after a change of size"
        )
    try:
        return data[index]
    except IndexError as error:
        raise IndexError(
            f"session.batch(data): data has no sample {index} ({error}); sample numbers count on from step to step: "
            "give data that takes any number, such as one that returns sample i % len, or run fewer steps"
        ) from error


def _to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_to_device(value, device) for value in batch]
    return batch
