"""ZeRO-1: which ranks hold which parts of the flat buffers that split optimizer state over the replicas.

Each (stage, tp part) stores its boxes one after the other in a flat buffer, and every replica holds one range of it.
Within a cell (`placing.cells`), row-major order advances monotonically through each of these buffers, so a
replica's range is one interval of the cell. The intervals between the borders in all buffers that contain the cell are
the atoms: about as many as there are ranks and cells together, and no rank's boxes have to be listed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from etc_agent.planner.placing.cells import Cell, cells_of
from etc_agent.state.model import TensorSpec
from etc_agent.state.sharding import Sharding, Unit

_Ranks = tuple[int, ...]
_Buffer = tuple[int, int, int | None]
"""Stage, tp part and, for the buffer of the experts, the ep part that holds them."""


def flat_atoms(previous: Sharding, current: Sharding) -> dict[tuple[_Ranks, _Ranks], int]:
    """(ranks that hold it before, ranks that need it after) -> elements, of every kind that ZeRO-1 splits."""
    before, after = _Buffers(previous), _Buffers(current)
    cells: dict[TensorSpec, list[Cell]] = {}
    sizes: dict[tuple[_Ranks, _Ranks], int] = {}
    for old, new in zip(previous.units(), current.units(), strict=True):
        spec = old.spec
        if spec not in cells:
            cells[spec] = list(cells_of(spec, previous.config.tp, current.config.tp))
        for cell in cells[spec]:
            grid = _Grid.of(spec, cell)
            holders, needers = before.cuts(old, cell.before, grid), after.cuts(new, cell.after, grid)
            edges = sorted({0, *(at for cuts in (*holders, *needers) for at in cuts.at if at < grid.size)})
            for start, end in zip(edges, [*edges[1:], grid.size], strict=True):
                owners = tuple(sorted(c.owner(start) for c in holders)), tuple(sorted(c.owner(start) for c in needers))
                sizes[owners] = sizes.get(owners, 0) + end - start
    return sizes


@dataclass(frozen=True, slots=True)
class _Grid:
    """A cell as `rows` runs of `run` contiguous elements. `inner`: elements per unit of the dim that tp cuts."""

    rows: int
    run: int
    inner: int
    start: int

    @classmethod
    def of(cls, spec: TensorSpec, cell: Cell) -> _Grid:
        if spec.tp_dim is None:
            return cls(1, prod(spec.shape), prod(spec.shape), 0)
        inner = prod(spec.shape[spec.tp_dim + 1 :])
        return cls(prod(spec.shape[: spec.tp_dim]), (cell.end - cell.start) * inner, inner, cell.start)

    @property
    def size(self) -> int:
        return self.rows * self.run


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Where the ranges of one buffer change in a cell: `at` ascending; `first` + number of cuts passed is the range.

    Range i belongs to rank ``base + i * step``.
    """

    at: list[int]
    first: int
    base: int
    step: int

    def owner(self, position: int) -> int:
        return self.base + (self.first + bisect_right(self.at, position)) * self.step


class _Buffers:
    """All flat buffers of a sharding."""

    def __init__(self, sharding: Sharding) -> None:
        self.sharding = sharding
        tp = sharding.config.tp
        self.intervals: dict[TensorSpec, list[list[tuple[int, int]]]] = {}
        self.starts: dict[tuple[str, int, int], int] = {}
        """(unit, stage, tp part) -> where its first box begins in the buffer."""
        totals: dict[_Buffer, int] = {}
        for unit in sharding.units():
            spec = unit.spec
            if spec not in self.intervals:
                self.intervals[spec] = [self._intervals(spec, part) for part in range(tp)]
            across = prod(spec.shape) // spec.shape[spec.tp_dim] if spec.tp_dim is not None else prod(spec.shape)
            for stage in unit.stages:
                for part, intervals in enumerate(self.intervals[spec]):
                    buffer = self._buffer(unit, stage, part)
                    start = totals.get(buffer, 0)
                    self.starts[unit.name, stage, part] = start
                    totals[buffer] = start + sum(end - low for low, end in intervals) * across
        self.range_sizes = {
            buffer: sharding.range_size(total, self._num_ranges(buffer)) for buffer, total in totals.items()
        }

    def cuts(self, unit: Unit, parts: _Ranks, grid: _Grid) -> list[_Cuts]:
        """Those of every buffer that holds the cell, which is part of the tp parts `parts` of `unit`."""
        return [self._cuts(unit, stage, part, grid) for stage in unit.stages for part in parts]

    def _cuts(self, unit: Unit, stage: int, part: int, grid: _Grid) -> _Cuts:
        config, replicas = self.sharding.config, self.sharding.num_replicas
        buffer = self._buffer(unit, stage, part)
        size, start = self.range_sizes[buffer], self.starts[unit.name, stage, part]
        for low, high in self._boxes_before(unit.spec, part, grid.start):
            start += (high - low) * grid.inner * grid.rows
        low, high = self._box_at(unit.spec, part, grid.start)
        width, lead = (high - low) * grid.inner, (grid.start - low) * grid.inner
        first = start // size
        last = (start + grid.rows * width - 1) // size
        at = []
        for boundary in range(first + 1, last + 1):
            row, column = divmod(boundary * size - start, width)
            at.append(row * grid.run + min(max(column - lead, 0), grid.run))
        step = config.tp * (config.ep if buffer[2] is not None else 1)
        return _Cuts(at, first, (stage * replicas + (buffer[2] or 0)) * config.tp + part, step)

    def _boxes_before(self, spec: TensorSpec, part: int, at: int) -> Iterator[tuple[int, int]]:
        return ((low, high) for low, high in self.intervals[spec][part] if high <= at)

    def _box_at(self, spec: TensorSpec, part: int, at: int) -> tuple[int, int]:
        return next((low, high) for low, high in self.intervals[spec][part] if low <= at < high)

    def _intervals(self, spec: TensorSpec, part: int) -> list[tuple[int, int]]:
        return [(0, 1)] if spec.tp_dim is None else spec.intervals(self.sharding.config.tp, part)

    def _buffer(self, unit: Unit, stage: int, part: int) -> _Buffer:
        expert = unit.spec.expert
        return stage, part, None if expert is None else self.sharding.expert_home(expert)

    def _num_ranges(self, buffer: _Buffer) -> int:
        return self.sharding.num_replicas // (1 if buffer[2] is None else self.sharding.config.ep)
