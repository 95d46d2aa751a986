"""Parallel configs: the degrees of hybrid parallelism and the grid of virtual ranks they span."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

_FIELD = re.compile(r"(PP|TP|DP|EP|CP)([0-9]+)")


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A position in the parallel grid: one index per axis, each from 0."""

    pp: int
    dp: int
    tp: int
    cp: int = 0


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Degrees of pipeline, tensor, data, expert and context parallelism.

    Virtual ranks number the grid in Megatron's order: tp fastest, then cp, then dp, then pp. Expert parallelism has no
    axis of its own: ep neighbours along dp x cp share the experts among them, so that ep divides dp * cp.

    Raises:
        ValueError: a degree is not a positive integer, or ep does not divide dp * cp.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for axis in ("pp", "tp", "dp", "ep", "cp"):
            degree = getattr(self, axis)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(f"{axis} must be a positive integer, not {degree!r}")
        if self.dp * self.cp % self.ep:
            raise ValueError(f"{self}: ep={self.ep} does not divide dp * cp = {self.dp * self.cp}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``PP4TP2DP2``; axes in any order and case, a missing axis is 1.

        Raises:
            ValueError: `text` is not of that form.
        """
        written = text.strip().upper()
        fields = _FIELD.findall(written)
        axes = [axis for axis, _ in fields]
        if not fields or "".join(axis + degree for axis, degree in fields) != written or len(set(axes)) != len(axes):
            raise ValueError(f"{text!r} is not a parallel config; write it like PP2TP2DP1")
        return cls(**{axis.lower(): int(degree) for axis, degree in fields})

    def __str__(self) -> str:
        rare = "".join(f"{axis.upper()}{degree}" for axis in ("ep", "cp") if (degree := getattr(self, axis)) > 1)
        return f"PP{self.pp}TP{self.tp}DP{self.dp}{rare}"

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp * self.dp * self.cp

    def coordinate(self, rank: int) -> Coordinate:
        """The grid position of virtual rank `rank`."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"virtual rank {rank} is outside {self}, which has {self.num_ranks}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinate(pp=pp, dp=dp, tp=tp, cp=cp)

    def rank(self, coordinate: Coordinate) -> int:
        """The virtual rank at `coordinate`."""
        return ((coordinate.pp * self.dp + coordinate.dp) * self.cp + coordinate.cp) * self.tp + coordinate.tp

    def replica(self, rank: int) -> int:
        """The position along dp x cp, which hold copies of the dense parameters."""
        return rank // self.tp % (self.dp * self.cp)

    def expert_part(self, rank: int) -> int:
        """Which of the ep parts of the experts the rank holds."""
        return self.replica(rank) % self.ep
