"""A DataLoader over the job's sequence of samples, which outlives changes of size.

torch's DataLoader fetches beside training. Its sampler does not end: it is told which samples come next. After a change
of dp, or where a step is run again, what was fetched for nothing is dropped and the sampler continues elsewhere; the
worker processes stay.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from etc_agent.worker.data.epochs import Epochs

Samples = tuple[int, ...]
"""The numbers of one batch's samples in the job's sequence."""


class StepPart(Protocol):
    """A dp rank's part of a step: `batch.Place`."""

    def batches(self, loader: Loader) -> Iterator[Any]: ...

    def num_batches(self, loader: Loader) -> int: ...


class Loader:
    """See `Session.loader`. `batch_size`: samples per microbatch, None for all of a rank's samples in one batch.

    Iterated over in a step, it gives this rank's samples of that step, and its length is how many batches they are:
    all of one size, which is the largest up to `batch_size` that divides them.

    `present`: this rank's part of the present step.
    """

    def __init__(
        self,
        dataset: Dataset,
        global_batch: int,
        *,
        batch_size: int | None,
        shuffle: int | None,
        drop_last: bool,
        num_workers: int,
        collate_fn: Callable[[list], Any] | None,
        seed: int,
        options: dict[str, Any],
        present: Callable[[], StepPart],
    ) -> None:
        self._present = present
        num_samples = _length(dataset)
        self._epochs = Epochs(num_samples, _per_epoch(num_samples, global_batch, drop_last=drop_last), shuffle)
        self._global_batch = global_batch
        self.batch_size = batch_size
        self._feed = _Feed(self._epochs)
        # A generator of its own, so that the training's random streams do not depend on the number of workers.
        own = torch.Generator(device="cpu").manual_seed(seed)
        collate = _Collate(default_collate if collate_fn is None else collate_fn)
        self._loader = DataLoader(
            _Numbered(dataset, seed), batch_sampler=self._feed, collate_fn=collate, num_workers=num_workers,
            generator=own, **options,
        )
        self._batches: Iterator[Any] | None = None
        if num_workers:
            self._batches = iter(self._loader)  # starts the worker processes, before there is anything to fetch

    @property
    def steps_per_epoch(self) -> float:
        """Steps in which every sample of the dataset comes once; whole with ``drop_last=True``."""
        return self._epochs.per_epoch / self._global_batch

    def epoch(self, step: int) -> int:
        """The epoch, from 0, of the first sample of `step`."""
        return self._epochs.epoch(step * self._global_batch)

    def __iter__(self) -> Iterator[Any]:
        return self._present().batches(self)

    def __len__(self) -> int:
        return self._present().num_batches(self)

    def fetch(self, ids: Sequence[int], following: Callable[[], Iterable[Sequence[int]]]) -> Any:
        """The batch of the samples `ids`, on the host. `following`: returns what will probably be asked for after
        it."""
        wanted = tuple(ids)
        if not self._feed.will_give(wanted):
            self._feed.go_on_with(wanted, following())
        if self._batches is None:
            self._batches = iter(self._loader)
        while True:
            batch = next(self._batches)
            if self._feed.given.popleft() == wanted:
                return batch


class _Feed:
    """The sampler: gives the numbers and indices of the samples that are to be fetched next. `given`: what the
    DataLoader has taken and not returned yet, in order."""

    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs
        self._next: deque[Samples] = deque()
        self._following: Iterator[Sequence[int]] = iter(())
        self.given: deque[Samples] = deque()

    def will_give(self, samples: Samples) -> bool:
        """Whether the next batch that is not dropped will be that of `samples`."""
        if samples in self.given:
            return True
        self._look_ahead()
        return bool(self._next) and self._next[0] == samples

    def go_on_with(self, samples: Samples, following: Iterable[Sequence[int]]) -> None:
        self._next = deque([samples])
        self._following = iter(following)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        while True:
            self._look_ahead()
            samples = self._next.popleft() if self._next else ()
            self.given.append(samples)
            yield [(number, self._epochs.index(number)) for number in samples]

    def _look_ahead(self) -> None:
        if not self._next:
            self._next.extend(tuple(samples) for samples in (next(self._following, None),) if samples is not None)


class _Numbered(Dataset):
    """`dataset` by (number in the job's sequence, index). While a sample is made, the random generators are seeded with
    its number, so that random augmentation does not depend on the size of the job."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitems__(self, samples: list[tuple[int, int]]) -> list[Any]:
        if samples and hasattr(self._dataset, "__getitems__"):
            with _seeded(self._seed + samples[0][0]):
                return self._dataset.__getitems__([index for _, index in samples])
        return [self[sample] for sample in samples]

    def __getitem__(self, sample: tuple[int, int]) -> Any:
        number, index = sample
        with _seeded(self._seed + number):
            return self._dataset[index]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Within the context, Python's, NumPy's and torch's CPU generators start from `seed`; in the training process they
    continue afterwards where they were."""
    numpy = sys.modules.get("numpy")
    before = None
    if get_worker_info() is None:
        before = random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy else None
    random.seed(seed)
    torch.random.default_generator.manual_seed(seed)
    if numpy:
        numpy.random.seed(seed % (1 << 32))
    try:
        yield
    finally:
        if before is not None:
            random.setstate(before[0])
            torch.set_rng_state(before[1])
            if numpy:
                numpy.random.set_state(before[2])


class _Collate:
    """`collate`, except that no samples make no batch."""

    def __init__(self, collate: Callable[[list], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list) -> Any:
        return self._collate(samples) if samples else None


def _length(dataset: Any) -> int:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"session.loader takes a dataset with dataset[i] and len(dataset), not {type(dataset).__name__}: "
            "a change of size continues at any sample; for an iterator use session.stream(factory)"
        )
    try:
        return len(dataset)
    except TypeError:
        raise TypeError(
            f"session.loader takes a dataset with a length, and {type(dataset).__name__} has none; define __len__"
        ) from None


def _per_epoch(num_samples: int, global_batch: int, *, drop_last: bool) -> int:
    per_epoch = num_samples // global_batch * global_batch if drop_last else num_samples
    if per_epoch < 1:
        raise ValueError(
            f"the dataset has {num_samples} samples, fewer than one global batch of {global_batch}; "
            "choose a smaller global_batch, or drop_last=False"
        )
    return per_epoch
