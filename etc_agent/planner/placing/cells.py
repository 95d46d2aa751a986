"""Cells: the parts into which a tensor is divided by all cuts of tensor parallelism, before and after a change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from etc_agent.state.model import TensorSpec

_Parts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """[start, end) along the dim that tp cuts; held by the tp parts `before` and needed by the tp parts `after`.

    A tensor that tp does not cut has one cell, [0, 1).
    """

    start: int
    end: int
    before: _Parts
    after: _Parts


def cells_of(spec: TensorSpec, tp_before: int, tp_after: int) -> Iterator[Cell]:
    """The cells of a tensor of `spec` between all cuts of both generations."""
    if spec.tp_dim is None:
        yield Cell(0, 1, tuple(range(tp_before)), tuple(range(tp_after)))
        return
    sides = [[spec.intervals(tp, part) for part in range(tp)] for tp in (tp_before, tp_after)]
    cuts = sorted({edge for side in sides for intervals in side for interval in intervals for edge in interval})
    number = {edge: index for index, edge in enumerate(cuts)}
    owners: tuple[list[list[int]], list[list[int]]] = ([[] for _ in cuts], [[] for _ in cuts])
    for side, found in zip(sides, owners, strict=True):
        for part, intervals in enumerate(side):
            for low, high in intervals:
                for index in range(number[low], number[high]):
                    found[index].append(part)
    for index, (start, end) in enumerate(pairwise(cuts)):
        yield Cell(start, end, tuple(owners[0][index]), tuple(owners[1][index]))
