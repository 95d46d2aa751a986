"""Samples from an iterator that can be started at any sample number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Factory = Callable[[int, int, int], Iterator[Any]]
"""(start, rank, size) -> the samples ``start + rank``, ``start + rank + size``, ``start + rank + 2*size`` ... of the
job's sequence: those of dp rank `rank` of `size`."""


class Stream:
    """See `Session.stream`."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._samples: Iterator[Any] = iter(())
        self._at: tuple[int, int, int] | None = None

    def take(self, start: int, global_batch: int, rank: int, size: int) -> list[Any]:
        """This dp rank's samples of the step whose first sample is `start`.

        Raises:
            IndexError: the factory's iterator has ended.
        """
        if self._at != (start, rank, size):
            self._samples = iter(self._factory(start, rank, size))
        count = global_batch // size
        taken = []
        for _ in range(count):
            try:
                taken.append(next(self._samples))
            except StopIteration:
                self._at = None
                raise IndexError(
                    f"session.stream: factory({start}, {rank}, {size}) gave {len(taken)} of the {count} samples of "
                    "this step; let it start over at its end, or run fewer steps"
                ) from None
        self._at = (start + global_batch, rank, size)
        return taken
