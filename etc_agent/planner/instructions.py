"""The instructions of one worker of a very large job, without computing those of the others.

Every worker applies the same rule, so that each sends what the other expects. For each part of a tensor with the same
holders and the same receivers: receivers that share a node with a holder get it from there. The demand of the others,
laid end to end, is cut into equal shares, one per holder, so that all holders send the same amount and no list has to
be exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etc_agent.parallel.topology import Placement
from etc_agent.planner.cells import Cell, cells_of
from etc_agent.planner.errors import PlanError
from etc_agent.planner.plan import Refer, Transfer
from etc_agent.state.boxes import Box
from etc_agent.state.model import TensorSpec
from etc_agent.state.sharding import Sharding, Unit


@dataclass(frozen=True, slots=True)
class WorkerInstructions:
    """What `worker` does, in the order of the model; `sends` and `receives` are of one box each."""

    worker: int
    refers: tuple[Refer, ...]
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class _Share:
    """Rows [low, high) / whole of a cell go from `source` to `target` (workers)."""

    source: int
    target: int
    low: int
    high: int
    whole: int


class Instructor:
    """Everything about a change of one model that does not depend on which worker asks.

    Workers are numbered as in `etc_agent.planner.plan`: previous ranks first, then those who join, by current rank.

    Raises:
        PlanError: two models, or one with ZeRO-1 (its flat ranges need the real manifests: `make_plan`).
    PlanError: the models differ, or use ZeRO-1 (its flat ranges need the real manifests: `make_plan`).
"""

    def __init__(
        self, previous: Sharding, current: Sharding, previous_placement: Placement, placement: Placement
    ) -> None:
        if previous.model != current.model or previous.model.zero1:
            raise PlanError("instructions by rule need one model without ZeRO-1; make_plan works from manifests")
        self.previous, self.current = previous, current
        number = {slot: worker for worker, slot in enumerate(previous_placement)}
        for slot in placement:
            number.setdefault(slot, len(number))
        self.num_workers = len(number)
        self.worker_of_rank = np.array([number[slot] for slot in placement], dtype=np.int64)
        self.rank_of_worker = np.full(self.num_workers, -1, dtype=np.int64)
        self.rank_of_worker[self.worker_of_rank] = np.arange(len(placement))
        nodes: dict[str, int] = {}
        self.node_of_worker = np.array([nodes.setdefault(slot.node, len(nodes)) for slot in number], dtype=np.int64)

    def instructions(self, worker: int) -> WorkerInstructions:
        """All instructions of `worker`."""
        refers: list[Refer] = []
        sends: list[Transfer] = []
        receives: list[Transfer] = []
        shares: dict[tuple[TensorSpec, Cell, tuple[int, ...], tuple[int, ...]], list[_Share]] = {}
        cells: dict[TensorSpec, list[Cell]] = {}
        mine_before, mine_after = self._part(self.previous, worker), self._part(
            self.current, int(self.rank_of_worker[worker])
        )
        for unit, before in zip(self.current.units(), self.previous.units(), strict=True):
            holds = mine_before is not None and self._has(self.previous, worker, before)
            needs = mine_after is not None and self._has(self.current, int(self.rank_of_worker[worker]), unit)
            if not holds and not needs:
                continue
            spec = unit.spec
            if spec not in cells:
                cells[spec] = list(cells_of(spec, self.previous.config.tp, self.current.config.tp))
            old = self.previous.boxes(spec, mine_before) if holds and mine_before is not None else []
            new = self.current.boxes(spec, mine_after) if needs and mine_after is not None else []
            kept = [box for box in new if box in old]
            refers += self._refers(worker, unit, [(box, box, box) for box in kept])
            for cell in cells[spec]:
                box = _cell_box(spec, cell)
                source, target = _around(old, box), _around(new, box)
                if target is not None and target not in kept and source is not None:
                    refers += self._refers(worker, unit, [(box, source, target)])
                key = (spec, cell, before.stages, unit.stages)
                if key not in shares:
                    shares[key] = list(self._shares(worker, spec, cell, before.stages, unit.stages))
                for share in shares[key]:
                    piece = _rows(box, share)
                    if piece.num_elements:
                        (sends if share.source == worker else receives).extend(
                            self._transfers(unit, piece, box, share)
                        )
        return WorkerInstructions(worker, tuple(refers), tuple(sends), tuple(receives))

    def _part(self, sharding: Sharding, rank: int) -> int | None:
        """The tp index of `rank`; None where there is no such rank."""
        return rank % sharding.config.tp if 0 <= rank < sharding.config.num_ranks else None

    def _has(self, sharding: Sharding, rank: int, unit: Unit) -> bool:
        config, expert = sharding.config, unit.spec.expert
        stage = rank // (config.num_ranks // config.pp)
        return stage in unit.stages and (expert is None or sharding.expert_home(expert) == config.expert_part(rank))

    def _shares(
        self, worker: int, spec: TensorSpec, cell: Cell, before: Sequence[int], after: Sequence[int]
    ) -> Iterator[_Share]:
        """The shares of one cell that `worker` sends or receives."""
        holders = self.previous.ranks(before, cell.before, spec.expert)
        needers = self.worker_of_rank[self.current.ranks(after, cell.after, spec.expert)]
        lacking = np.setdiff1d(needers, holders)
        if not len(lacking) or (worker not in holders and worker not in lacking):
            return
        at, home = self.node_of_worker[holders], self.node_of_worker[lacking]
        near = np.isin(home, at)
        yield from self._near(worker, holders, at, lacking[near], home[near])
        yield from _far(worker, holders, lacking[~near])

    def _near(
        self, worker: int, holders: NDArray[np.int64], at: NDArray[np.int64], lacking: NDArray[np.int64],
        home: NDArray[np.int64],
    ) -> Iterator[_Share]:
        node = self.node_of_worker[worker]
        sources, targets = holders[at == node], lacking[home == node]
        for index, target in enumerate(targets):
            source = sources[index % len(sources)]
            if worker in (source, target):
                yield _Share(int(source), int(target), 0, 1, 1)

    def _refers(self, worker: int, unit: Unit, boxes: Sequence[tuple[Box, Box, Box]]) -> list[Refer]:
        kinds = self.current.model.kinds
        return [Refer(worker, self.current.logical(unit, kind), *entry) for kind in kinds for entry in boxes]

    def _transfers(self, unit: Unit, piece: Box, box: Box, share: _Share) -> Iterator[Transfer]:
        source = _around(self.previous.boxes(unit.spec, share.source % self.previous.config.tp), box)
        rank = int(self.rank_of_worker[share.target])
        target = _around(self.current.boxes(unit.spec, rank % self.current.config.tp), box)
        if source is None or target is None:
            raise AssertionError(f"{unit.name}: {box} is not a part of the shards of {share}")
        for kind in self.current.model.kinds:
            yield Transfer(share.source, share.target, self.current.logical(unit, kind), piece, source, target)


def _far(worker: int, holders: NDArray[np.int64], lacking: NDArray[np.int64]) -> Iterator[_Share]:
    """On a line of R * H units, receiver x takes [x * H, (x + 1) * H) and holder k sends [k * R, (k + 1) * R)."""
    num_holders, num_lacking = len(holders), len(lacking)
    if not num_lacking:
        return
    as_source, as_target = np.flatnonzero(holders == worker), np.flatnonzero(lacking == worker)
    if len(as_target):
        x = int(as_target[0])
        start, end = x * num_holders, (x + 1) * num_holders
        pairs = [(k, x) for k in range(start // num_lacking, -(-end // num_lacking))]
    elif len(as_source):
        k = int(as_source[0])
        start, end = k * num_lacking, (k + 1) * num_lacking
        pairs = [(k, x) for x in range(start // num_holders, -(-end // num_holders))]
    else:
        return
    for k, x in pairs:
        low = max(k * num_lacking, x * num_holders) - x * num_holders
        high = min((k + 1) * num_lacking, (x + 1) * num_holders) - x * num_holders
        yield _Share(int(holders[k]), int(lacking[x]), int(low), int(high), num_holders)


def _cell_box(spec: TensorSpec, cell: Cell) -> Box:
    offset, shape = [0] * len(spec.shape), list(spec.shape)
    if spec.tp_dim is not None:
        offset[spec.tp_dim], shape[spec.tp_dim] = cell.start, cell.end - cell.start
    return Box(tuple(offset), tuple(shape))


def _around(boxes: Sequence[Box], box: Box) -> Box | None:
    """The one of `boxes` that contains `box`."""
    return next((outer for outer in boxes if box.intersect(outer) == box), None)


def _rows(box: Box, share: _Share) -> Box:
    """The part of a cell's first dim that a share is."""
    rows = box.shape[0]
    low, high = rows * share.low // share.whole, rows * share.high // share.whole
    return Box((box.offset[0] + low, *box.offset[1:]), (high - low, *box.shape[1:]))
