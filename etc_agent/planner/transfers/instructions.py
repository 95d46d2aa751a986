"""One worker's part of a migration plan, without computing those of the others.

Every worker applies the rules of `routes` and `rounds` to the tensors that it holds or needs, so that each sends what
the other expects. `transfers.migration.make_plan` gives the same transfers from every worker's manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from etc_agent.planner.errors import PlanError
from etc_agent.planner.transfers.classes import Entry, Side
from etc_agent.planner.transfers.coverage import check_boxes, missing_and_kept
from etc_agent.planner.transfers.demands import Owners, Workers, match
from etc_agent.planner.transfers.plan import MigrationPlan, Refer, Transfer
from etc_agent.planner.transfers.rounds import Kind, Limits, Region, in_order, transfers_of
from etc_agent.state.boxes import Box
from etc_agent.state.layout import LogicalTensor, Manifest

_Pattern = tuple[Kind, Region]


class Instructor:
    """What `worker` does in the change from `previous` to `current`.

    Args:
        held, needed: the worker's own manifests.
        nodes: worker -> number of its node.
        forwarding: receivers pass on what they have received.

    Attributes:
        num_regions: in how many regions (`rounds`) the worker sends or receives. `plan` needs the largest of all
            workers'.

    Raises:
        MissingSourceError: a box of a tensor that the worker holds or needs is held by nobody.
        PlanError: manifests disagree about such a tensor, a shard is outside it, or one worker's shards overlap.
    """

    def __init__(
        self, worker: int, previous: Side, current: Side, held: Manifest, needed: Manifest,
        nodes: Sequence[int] | Workers, *, forwarding: bool,
    ) -> None:
        self._worker = worker
        self._previous, self._current = previous, current
        self._nodes = np.asarray(nodes, dtype=np.int64)
        self._forwarding = forwarding
        self.num_workers = len(self._nodes)
        self._kinds: dict[tuple[Any, ...], Kind] = {}
        self._regions: dict[tuple[bytes, bytes], Region] = {}
        self._collect(held, needed)
        self.refers = self._kept(held, needed)
        self.num_regions = num_regions(list(self._regions.values()), worker, forwarding=forwarding)

    def plan(self, round_bytes: int, round_transfers: int, regions: int, digest: str) -> MigrationPlan:
        """The worker's part. `regions`: the largest `num_regions` of all workers. `digest`: of what all workers derive
        their parts from."""
        limits = Limits(round_bytes, round_transfers, max(1, regions))
        transfers: list[tuple[int, Transfer]] = []
        for region in self._regions.values():
            for tensor, number, cut in region.rounds(limits):
                transfers += transfers_of(tensor, number, cut, self._worker)
        return MigrationPlan(self.num_workers, self.refers, in_order(transfers), digest)

    def _collect(self, held: Manifest, needed: Manifest) -> None:
        tensors = {shard.tensor.name: shard.tensor for shard in (*held, *needed)}
        before, after = self._previous.find(tensors), self._current.find(tensors)
        known: dict[tuple[Any, ...], _Pattern] = {}
        for name in sorted(after):
            old, new = before.get(name, []), after[name]
            tensor = tensors[name]
            key = (tensor.itemsize, *[(e.owner, e.number) for e in old], None, *[(e.owner, e.number) for e in new])
            if key not in known:
                _check_facts(tensor, (*old, *new))
                known[key] = self._pattern(tensor, self._owners(tensor, self._previous, old),
                                           self._owners(tensor, self._current, new))
            kind, region = known[key]
            region.add(tensor, kind)

    def _pattern(self, tensor: LogicalTensor, old: Owners, new: Owners) -> _Pattern:
        region = self._regions.setdefault((_everybody(old), _everybody(new)), Region())
        key = (tensor.shape, tensor.itemsize, _canonical(old), _canonical(new))
        if key not in self._kinds:
            demands = match(tensor.name, old, new)
            self._kinds[key] = Kind(demands, tensor.itemsize, self._nodes, forwarding=self._forwarding)
        return self._kinds[key], region

    def _owners(self, tensor: LogicalTensor, side: Side, entries: Sequence[Entry]) -> Owners:
        boxes: dict[int, list[Box]] = {}
        for entry in entries:
            boxes.setdefault(entry.owner, []).append(entry.alike.box)
        owners = [(tuple(sorted(of)), side.workers(owner)) for owner, of in boxes.items()]
        for of, workers in owners:
            check_boxes(tensor, of, int(workers[0]))
        return owners

    def _kept(self, held: Manifest, needed: Manifest) -> tuple[Refer, ...]:
        mine: dict[str, list[Box]] = {}
        for shard in held:
            mine.setdefault(shard.tensor.name, []).append(shard.box)
        refers = []
        for shard in sorted(needed):
            _, kept = missing_and_kept(shard.box, sorted(mine.get(shard.tensor.name, ())))
            refers += [Refer(self._worker, shard.tensor, box, source, shard.box) for box, source in kept]
        return tuple(refers)


def num_regions(regions: Sequence[Region], worker: int, *, forwarding: bool) -> int:
    """In how many of the regions the worker can send, or in how many it receives, whichever is more."""
    sends = receives = 0
    for region in regions:
        if region.tensors:
            holders, needers = region.members()
            is_needer = worker in needers
            receives += is_needer
            sends += worker in holders or (forwarding and is_needer)
    return max(sends, receives)


def _check_facts(tensor: LogicalTensor, entries: Sequence[Entry]) -> None:
    for entry in entries:
        other = entry.alike.logical(tensor.name)
        if other != tensor:
            raise PlanError(f"{tensor.name}: {tensor.dtype} of shape {tensor.shape} on one worker, {other.dtype} of "
                            f"shape {other.shape} on another")


def _everybody(owners: Owners) -> bytes:
    return np.sort(np.concatenate([workers for _, workers in owners])).tobytes() if owners else b""


def _canonical(owners: Owners) -> tuple[Any, ...]:
    by_boxes: dict[tuple[Box, ...], list[Workers]] = {}
    for boxes, workers in owners:
        by_boxes.setdefault(boxes, []).append(workers)
    return tuple((boxes, np.sort(np.concatenate(by_boxes[boxes])).tobytes()) for boxes in sorted(by_boxes))
