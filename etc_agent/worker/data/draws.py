"""Random numbers by sample: for scripts that read random places of a file instead of a dataset's samples."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch


class Draws:
    """See `Session.randint`. Counts what the present step has drawn."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._taken = 0

    def begin_step(self) -> None:
        self._taken = 0

    def take(self, ids: Sequence[int], high: int, size: tuple[int, ...]) -> torch.Tensor:
        """Numbers from 0 up to `high` for the next of the rank's samples `ids`, as a tensor of `size`.

        Raises:
            ValueError: there are not so many samples left.
        """
        count = math.prod(size)
        taken = ids[self._taken : self._taken + count]
        if len(taken) < count:
            raise ValueError(
                f"session.randint: this rank has {len(ids)} samples in a step, and {self._taken + count} are drawn; "
                "draw global_batch / dp numbers in each step"
            )
        self._taken += count
        numbers = [random.Random(f"{self._seed}:{sample}").randrange(high) for sample in taken]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu").reshape(size)

    def check(self, ids: Sequence[int]) -> None:
        """Raise ValueError where the present step has drawn for some of the rank's samples `ids` only."""
        if self._taken not in (0, len(ids)):
            raise ValueError(
                f"session.randint: this rank has {len(ids)} samples in a step, and {self._taken} were drawn; draw "
                "global_batch / dp numbers in each step, and let build() raise ValueError where microbatches do not "
                "divide that"
            )
