"""From the numbers of the job's endless sequence of samples to the samples of a finite dataset."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch

_KEPT: Final = 2
"""Orders that are kept: at the border of two epochs both are needed."""


@dataclass(slots=True)
class Epochs:
    """A dataset of `num_samples`, again and again, of which each epoch takes the first `per_epoch` of its order.

    `shuffle`: the seed of the orders, which differ from epoch to epoch and are those of torch's DistributedSampler;
    None for the dataset's own order.
    """

    num_samples: int
    per_epoch: int
    shuffle: int | None
    _orders: dict[int, torch.Tensor] = field(default_factory=dict)

    def epoch(self, number: int) -> int:
        """The epoch, from 0, in which sample `number` of the job's sequence is."""
        return number // self.per_epoch

    def index(self, number: int) -> int:
        """The index in the dataset of sample `number` of the job's sequence."""
        epoch, position = divmod(number, self.per_epoch)
        return position if self.shuffle is None else int(self._order(epoch)[position])

    def _order(self, epoch: int) -> torch.Tensor:
        if epoch not in self._orders:
            assert self.shuffle is not None
            generator = torch.Generator(device="cpu").manual_seed(self.shuffle + epoch)
            self._orders[epoch] = torch.randperm(self.num_samples, generator=generator, device="cpu")
            for old in sorted(self._orders)[:-_KEPT]:
                del self._orders[old]
        return self._orders[epoch]
