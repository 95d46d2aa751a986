"""Demands: the boxes of one tensor that workers lack, each with all who lack it and all who hold it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etc_agent.planner.errors import MissingSourceError
from etc_agent.planner.transfers.coverage import Pattern, missing_and_kept, refine
from etc_agent.state.boxes import Box

Workers = NDArray[np.int64]
"""Worker numbers, ascending."""

Owners = Sequence[tuple[tuple[Box, ...], Workers]]
"""The shards of one tensor in one generation: groups of workers that hold just these boxes. No worker is in two."""


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """`needers` lack `box`, and each of `holders` can send it. `targets`, `sources`: the new shards of the needers and
    the old ones of the holders around it, each with the workers that have just this shard."""

    box: Box
    needers: Workers
    holders: Workers
    targets: tuple[tuple[Box, Workers], ...]
    sources: tuple[tuple[Box, Workers], ...]

    @classmethod
    def of(cls, box: Box, targets: Iterable[tuple[Box, Workers]], sources: Iterable[tuple[Box, Workers]]) -> Demand:
        targets, sources = _merged(targets), _merged(sources)
        return cls(box, _union(workers for _, workers in targets), _union(workers for _, workers in sources),
                   targets, sources)

    def target_box(self, worker: int) -> Box:
        return _around(self.targets, worker)

    def source_box(self, worker: int) -> Box:
        return _around(self.sources, worker)


def match(name: str, previous: Owners, current: Owners) -> list[Demand]:
    """The demands of one tensor. `name`: for the error.

    Raises:
        MissingSourceError: a needed box is held by nobody.
    """
    distinct = _Boxes(sorted({box for boxes, _ in previous for box in boxes if box.num_elements}))
    size = 1 + max((int(workers[-1]) for _, workers in (*previous, *current) if len(workers)), default=-1)
    group_of = np.full(size, -1, dtype=np.int64)
    for number, (_, workers) in enumerate(previous):
        group_of[workers] = number
    lacking: dict[Box, list[tuple[Box, Workers]]] = {}
    within: dict[Box, tuple[Box, ...]] = {}
    for boxes, workers in current:
        groups = group_of[workers]
        for group in np.unique(groups):
            mine = previous[int(group)][0] if group >= 0 else ()
            members = workers[groups == group]
            for target in boxes:
                for box, sources in refine(missing_and_kept(target, mine)[0], distinct.meeting(target)):
                    if not sources:
                        raise MissingSourceError(
                            f"{name}: no live worker holds the box at {box.offset} of shape {box.shape}, "
                            f"which worker {members[0]} needs"
                        )
                    lacking.setdefault(box, []).append((target, members))
                    within[box] = sources
    return [
        Demand.of(box, targets, [
            (source, workers) for boxes, workers in previous for source in boxes if source in within[box]
        ])
        for box, targets in lacking.items()
    ]


class _Boxes:
    """Boxes of one tensor, to find those that meet another box without comparing it with each in Python."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        self._starts = np.array([box.offset for box in boxes], dtype=np.int64)
        self._ends = self._starts + np.array([box.shape for box in boxes], dtype=np.int64)

    def meeting(self, box: Box) -> list[Box]:
        """Those that share an element with `box`, in their order."""
        if not box.shape or not self._boxes:
            return list(self._boxes)
        start = np.array(box.offset, dtype=np.int64)
        end = start + np.array(box.shape, dtype=np.int64)
        meets = ((self._starts < end) & (self._ends > start)).all(axis=1)
        return [self._boxes[index] for index in np.flatnonzero(meets).tolist()]


def demands_of(pattern: Pattern) -> list[Demand]:
    """The same from the needs of single workers."""
    targets: dict[Box, list[tuple[Box, Workers]]] = {}
    sources: dict[Box, list[tuple[Box, Workers]]] = {}
    for need in pattern.needs:
        targets.setdefault(need.box, []).append((need.target_box, np.array([need.target])))
        sources[need.box] = [
            (box, np.array([holder])) for holder, box in zip(need.holders, need.source_boxes, strict=True)
        ]
    return [Demand.of(box, targets[box], sources[box]) for box in targets]


def _merged(shards: Iterable[tuple[Box, Workers]]) -> tuple[tuple[Box, Workers], ...]:
    by_box: dict[Box, list[Workers]] = {}
    for box, workers in shards:
        by_box.setdefault(box, []).append(workers)
    return tuple((box, _union(by_box[box])) for box in sorted(by_box))


def _union(parts: Iterable[Workers]) -> Workers:
    parts = list(parts)
    return np.sort(parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(np.int64)


def _around(shards: Sequence[tuple[Box, Workers]], worker: int) -> Box:
    if len(shards) == 1:
        return shards[0][0]
    for box, workers in shards:
        at = int(np.searchsorted(workers, worker))
        if at < len(workers) and workers[at] == worker:
            return box
    raise KeyError(worker)
