"""Rounds: which transfers are in flight together, by a rule that every worker applies alone.

A *region* is all tensors with the same holders and the same needers (workers, whatever they hold of each). Its tensors
are taken in the order of their names, and rounds are filled one after the other; the rounds of all regions count from
0, so that regions are moved side by side. A worker is in few regions (of the stages that overlap with its own), and
each region gets an equal share of what a round may have. Only what is in the own regions has to be known.

All transfers of a round are posted before any is waited for, and rounds have one order everywhere, so that no cycle of
waits can occur. A worker forwards in a later round than it has received.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from etc_agent.planner.transfers.demands import Demand, Workers
from etc_agent.planner.transfers.plan import Transfer
from etc_agent.planner.transfers.routes import Legs, Routes
from etc_agent.planner.transfers.shares import shares
from etc_agent.state.algebra import split_box
from etc_agent.state.boxes import Box
from etc_agent.state.layout import LogicalTensor


@dataclass(frozen=True, slots=True)
class Limits:
    """What one worker sends, and what it receives, in one round: bytes; and the transfers it takes part in. They are
    shared by `regions`: the most regions that any worker sends in, or receives in."""

    round_bytes: int
    round_transfers: int
    regions: int


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Pieces of a box, relative to its offset, and the size of each."""

    boxes: tuple[Box, ...]
    num_elements: Workers


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """How one tensor moves: for each demand its chunks, relative to its box, and their legs. Chunk i of n travels in
    wave i * `num_waves` // n. `wave_bytes`, `wave_transfers`: the most that one worker has in a wave."""

    parts: tuple[tuple[Demand, Chunks, Legs], ...]
    num_waves: int
    wave_bytes: int
    wave_transfers: int


class Kind:
    """Tensors that are cut alike: one shape, one itemsize, and the same demands."""

    def __init__(self, demands: Sequence[Demand], itemsize: int, node_of: Workers, *, forwarding: bool) -> None:
        self._demands = [(demand, Routes(demand, node_of, forwarding=forwarding)) for demand in demands]
        divided = shares(demands, [routes.num_sent for _, routes in self._demands])
        for (demand, routes), share in zip(self._demands, divided, strict=True):
            if share is not None:
                routes.divide(demand.holders, share)
        self._itemsize = itemsize
        self._cuts: dict[tuple[int, int, int], Cut] = {}
        self.depth = max((routes.depth for _, routes in self._demands), default=0)
        self._period = max((routes.period for _, routes in self._demands), default=1)

    @property
    def demands(self) -> list[Demand]:
        return [demand for demand, _ in self._demands]

    def cut(self, ordinal: int, max_bytes: int, max_transfers: int) -> Cut:
        """The cut of the tensor with this number among those of a region and kind. Limits: of a wave; a wave of single
        elements may exceed them, and a wave with one chunk for each needer that of transfers."""
        key = (ordinal % self._period, max_bytes, max_transfers)
        if key not in self._cuts:
            self._cuts[key] = self._cut(*key)
        return self._cuts[key]

    def _cut(self, rotation: int, max_bytes: int, max_transfers: int) -> Cut:
        num_waves = 1
        finest = max(demand.box.num_elements for demand in self.demands)
        while True:
            parts = tuple(self._part(demand, routes, num_waves, rotation) for demand, routes in self._demands)
            most_bytes, most_transfers = self._most(parts, num_waves)
            has_one_of_each = num_waves >= max(len(chunks.boxes) for _, chunks, _ in parts)
            if most_bytes <= max_bytes and (most_transfers <= max_transfers or has_one_of_each):
                break
            if num_waves == finest:
                break
            num_waves = min(finest, max(num_waves + 1, min(-(-most_bytes // max_bytes), 4) * num_waves))
        return Cut(parts, num_waves, most_bytes, most_transfers)

    def _part(
        self, demand: Demand, routes: Routes, num_waves: int, rotation: int
    ) -> tuple[Demand, Chunks, Legs]:
        num_elements = demand.box.num_elements
        wanted = max(num_waves, routes.num_chunks(num_elements * self._itemsize))
        chunks = _chunks(demand.box.shape, -(-num_elements // min(wanted, num_elements)))
        return demand, chunks, routes.legs(len(chunks.boxes), rotation)

    def _most(self, parts: Sequence[tuple[Demand, Chunks, Legs]], num_waves: int) -> tuple[int, int]:
        """The most bytes that a worker sends or receives in a wave, and the most transfers."""
        sources, targets, sizes = [], [], []
        for _, chunks, legs in parts:
            chunk_bytes = chunks.num_elements * self._itemsize
            wave = legs.chunk * num_waves // len(chunks.boxes)
            sources.append(legs.source * num_waves + wave)
            targets.append(legs.target * num_waves + wave)
            sizes.append(chunk_bytes[legs.chunk])
        source, target, size = map(np.concatenate, (sources, targets, sizes))
        length = 1 + int(max(source.max(), target.max()))
        sent, received = np.bincount(source, size, length), np.bincount(target, size, length)
        count = np.bincount(source, minlength=length) + np.bincount(target, minlength=length)
        return int(max(sent.max(), received.max())), int(count.max())


@dataclass(slots=True, eq=False)
class Region:
    """`tensors`: in the order of their names, each with its kind. Tensors that nobody lacks are left out."""

    tensors: list[tuple[LogicalTensor, Kind]] = field(default_factory=list)

    def add(self, tensor: LogicalTensor, kind: Kind) -> None:
        if kind.demands:
            self.tensors.append((tensor, kind))

    def members(self) -> tuple[Workers, Workers]:
        """Who can send, and who lacks something. With forwarding those who lack something can send, too."""
        kinds = dict.fromkeys(kind for _, kind in self.tensors)
        demands = [demand for kind in kinds for demand in kind.demands]
        return (
            np.unique(np.concatenate([demand.holders for demand in demands])),
            np.unique(np.concatenate([demand.needers for demand in demands])),
        )

    def rounds(self, limits: Limits) -> Iterator[tuple[LogicalTensor, int, Cut]]:
        """Every tensor, the round of its first wave, and its cut."""
        depth = 1 + max((kind.depth for _, kind in self.tensors), default=0)
        # Waves that are forwarded overlap in time: a round has parts of up to `depth` of them.
        max_bytes = max(1, limits.round_bytes // limits.regions // depth)
        max_transfers = max(1, limits.round_transfers // limits.regions // depth)
        numbers: dict[Kind, int] = {}
        seen: dict[Kind, int] = {}
        number = used_bytes = used_transfers = 0
        for tensor, kind in self.tensors:
            start = numbers.setdefault(kind, len(numbers))
            ordinal = seen[kind] = seen.get(kind, -1) + 1
            cut = kind.cut(start + ordinal, max_bytes, max_transfers)
            if used_transfers and (
                cut.num_waves > 1 or used_bytes + cut.wave_bytes > max_bytes
                or used_transfers + cut.wave_transfers > max_transfers
            ):
                number, used_bytes, used_transfers = number + 1, 0, 0
            yield tensor, number, cut
            number += cut.num_waves - 1
            used_bytes, used_transfers = used_bytes + cut.wave_bytes, used_transfers + cut.wave_transfers


@lru_cache(maxsize=4096)
def _chunks(shape: tuple[int, ...], max_elements: int) -> Chunks:
    """A box of this shape at the origin, cut into pieces of at most so many elements."""
    boxes = tuple(split_box(Box((0,) * len(shape), shape), max_elements))
    return Chunks(boxes, np.array([box.num_elements for box in boxes]))


def _moved(box: Box, offset: tuple[int, ...]) -> Box:
    return Box(tuple(start + by for start, by in zip(box.offset, offset, strict=True)), box.shape)


def transfers_of(tensor: LogicalTensor, first_round: int, cut: Cut, worker: int | None = None) -> Iterator[
    tuple[int, Transfer]
]:
    """(round, transfer) of one tensor; only those that `worker` takes part in, if it is given."""
    for demand, chunks, legs in cut.parts:
        mine = legs.source >= 0 if worker is None else (legs.source == worker) | (legs.target == worker)
        for index in np.flatnonzero(mine).tolist():
            source, target = int(legs.source[index]), int(legs.target[index])
            chunk, depth = int(legs.chunk[index]), int(legs.depth[index])
            target_box = demand.target_box(target)
            source_box = demand.target_box(source) if depth else demand.source_box(source)
            wave = chunk * cut.num_waves // len(chunks.boxes)
            box = _moved(chunks.boxes[chunk], demand.box.offset)
            yield first_round + wave + depth, Transfer(
                source, target, tensor, box, source_box, target_box, forwarded=depth > 0
            )


def in_order(transfers: Sequence[tuple[int, Transfer]]) -> tuple[tuple[Transfer, ...], ...]:
    """Rounds, and in each the transfers in one order everywhere: by tensor, box, source, target."""
    rounds: list[list[Transfer]] = [[] for _ in range(1 + max((number for number, _ in transfers), default=-1))]
    for number, transfer in transfers:
        rounds[number].append(transfer)
    return tuple(
        tuple(sorted(each, key=lambda t: (t.tensor.name, t.box.offset, t.box.shape, t.source, t.target)))
        for each in rounds
    )
