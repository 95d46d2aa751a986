"""Parallel configs: the degrees of hybrid parallelism and the grid of virtual ranks they span."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

_FIELD = re.compile(r"(PP|TP|DP)([0-9]+)")


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A position in the parallel grid: one index per axis, each from 0."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Degrees of pipeline, tensor and data parallelism.

    Virtual ranks number the grid in Megatron's order: tp fastest, then dp, then pp.

    Raises:
        ValueError: a degree is not a positive integer.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for axis in ("pp", "tp", "dp"):
            degree = getattr(self, axis)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(f"{axis} must be a positive integer, not {degree!r}")

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
        return f"PP{self.pp}TP{self.tp}DP{self.dp}"

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp * self.dp

    def coordinate(self, rank: int) -> Coordinate:
        """The grid position of virtual rank `rank`."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"virtual rank {rank} is outside {self}, which has {self.num_ranks}")
        return Coordinate(pp=rank // (self.tp * self.dp), dp=rank // self.tp % self.dp, tp=rank % self.tp)

    def rank(self, coordinate: Coordinate) -> int:
        """The virtual rank at `coordinate`."""
        return (coordinate.pp * self.dp + coordinate.dp) * self.tp + coordinate.tp
