"""Which samples of the job's endless sequence a dp rank takes in a step, and in which microbatches.

Step s takes the samples ``s*GB .. (s+1)*GB - 1``, cut over dp in order, so that a change of dp neither loses nor
repeats one. Pure; no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from etc_agent.errors import ConfigRefusedError
from etc_agent.parallel.config import ParallelConfig

Division = Literal["equal", "weighted"]
DIVISIONS: Final = ("equal", "weighted")
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """`size`: samples per step over all ranks. `division`: with ``equal`` every dp rank takes as many, so dp has to
    divide `size`; with ``weighted`` the numbers differ by at most one, and the script weights its microbatches by their
    `Microbatch.factor`.
    """

    size: int
    division: Division = "equal"

    def check(self, config: ParallelConfig) -> None:
        """Raise ConfigRefusedError where the samples of a step cannot be divided over the dp ranks of `config`."""
        if self.division == "weighted":
            if config.dp > self.size:
                raise ConfigRefusedError(
                    f"{config}: a global batch of {self.size} has no sample for some of dp={config.dp} ranks; "
                    f"choose dp up to {self.size}, or a larger global batch"
                )
        elif self.size % config.dp:
            fitting = [str(dp) for dp in range(1, self.size + 1) if self.size % dp == 0]
            raise ConfigRefusedError(
                f"{config}: a global batch of {self.size} cannot be divided over dp={config.dp}; choose dp from "
                f"{', '.join(fitting)}, or use session.microbatches with division='weighted', which takes any dp"
            )

    def ids(self, step: int, rank: int, num_ranks: int) -> range:
        """The samples of `step` that dp rank `rank` of `num_ranks` takes."""
        first = step * self.size
        return range(first + self.size * rank // num_ranks, first + self.size * (rank + 1) // num_ranks)


@dataclass(frozen=True, slots=True)
class Part:
    """The samples of one microbatch. `weight`: how many of them count; 0 where the rank's samples have run out and it
    only takes part in the collectives."""

    ids: range
    weight: int
    is_last: bool

    def factor(self, size: int, num_ranks: int, reduction: Reduction) -> float:
        """What the mean loss over this microbatch is multiplied by, so that the reduced gradient is the exact mean over
        a global batch of `size`: where gradients are averaged (``mean``) or added (``sum``) over `num_ranks` dp
        ranks."""
        return self.weight * (num_ranks if reduction == "mean" else 1) / size


def parts(batch: GlobalBatch, step: int, rank: int, num_ranks: int, size: int) -> Iterator[Part]:
    """The microbatches of at most `size` samples of a dp rank: as many on every rank.

    Raises:
        ValueError: `size` is not positive.
    """
    if size < 1:
        raise ValueError(f"a microbatch has at least 1 sample, not {size}")
    ids = batch.ids(step, rank, num_ranks)
    most = -(-batch.size // num_ranks)
    count = -(-most // size)
    for number in range(count):
        taken = ids[number * size : (number + 1) * size]
        yield Part(taken or ids[:size], len(taken), number == count - 1)


def equal_parts(batch: GlobalBatch, step: int, rank: int, num_ranks: int, size: int) -> Iterator[Part]:
    """As `parts`, all of one size, the largest up to `size` that divides a rank's samples: so the mean over the
    microbatches' means, and over the ranks, is the mean over the global batch.

    Raises:
        ValueError: `size` is not positive, or dp does not divide the global batch.
    """
    own = len(batch.ids(step, rank, num_ranks))
    if batch.size % num_ranks:
        raise ValueError(
            f"a global batch of {batch.size} has no equal parts for dp={num_ranks}: use session.microbatches(loader), "
            "whose factors weight the losses"
        )
    fitting = next((number for number in range(min(size, own), 0, -1) if own % number == 0), size)
    return parts(batch, step, rank, num_ranks, fitting)
