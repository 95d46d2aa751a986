"""Coverage: which worker holds and which needs each part of the state; one pattern for all tensors that are cut alike.

A model's layers repeat, and so do the shapes and owners of their shards. The box algebra is done once per distinct
(shape, previous owners, current owners), so that making a plan costs little more than writing it down.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from etc_agent.planner.errors import MissingSourceError, PlanError
from etc_agent.state.algebra import box_overlap, subtract_box
from etc_agent.state.boxes import Box
from etc_agent.state.layout import LogicalTensor, Manifest


@dataclass(frozen=True, slots=True)
class Kept:
    """`worker` already holds `box` of its new shard `target_box`, in its old shard `source_box`."""

    worker: int
    box: Box
    source_box: Box
    target_box: Box


@dataclass(frozen=True, slots=True)
class Need:
    """`target` lacks `box` of its new shard `target_box`; ``holders[i]`` can send it from ``source_boxes[i]``."""

    target: int
    box: Box
    target_box: Box
    holders: tuple[int, ...]
    source_boxes: tuple[Box, ...]

    def source_box(self, holder: int) -> Box:
        return self.source_boxes[self.holders.index(holder)]


@dataclass(frozen=True, slots=True)
class Pattern:
    """What happens to every tensor of one shape and with the same owners. The boxes cover each new shard exactly
    once. `previous`, `current`: the workers that have a shard of it."""

    kept: tuple[Kept, ...]
    needs: tuple[Need, ...]
    previous: tuple[int, ...]
    current: tuple[int, ...]

    def canonical(self) -> str:
        """A text that is equal for equal patterns, in every process."""
        kept = [(k.worker, _plain(k.box), _plain(k.source_box), _plain(k.target_box)) for k in self.kept]
        needs = [
            (n.target, _plain(n.box), _plain(n.target_box), n.holders, [_plain(box) for box in n.source_boxes])
            for n in self.needs
        ]
        return repr((kept, needs))


@dataclass(frozen=True, slots=True)
class Coverage:
    """Every tensor that the current generation needs, sorted by name, with the index of its pattern."""

    patterns: tuple[Pattern, ...]
    tensors: tuple[tuple[LogicalTensor, int], ...]

    def needs(self) -> Iterator[tuple[LogicalTensor, Need]]:
        for tensor, index in self.tensors:
            for need in self.patterns[index].needs:
                yield tensor, need

    def kept(self) -> Iterator[tuple[LogicalTensor, Kept]]:
        for tensor, index in self.tensors:
            for kept in self.patterns[index].kept:
                yield tensor, kept


def find_coverage(previous: Sequence[Manifest], current: Sequence[Manifest]) -> Coverage:
    """Compare the current manifests with the previous ones; entry i of both is worker i's.

    Raises:
        MissingSourceError: a needed box is held by nobody.
        PlanError: manifests disagree about a tensor, a shard is outside its tensor, or one worker's shards overlap.
    """
    held, wanted = _collect(previous), _collect(current)
    patterns: dict[tuple[object, ...], tuple[int, Pattern]] = {}
    tensors: list[tuple[LogicalTensor, int]] = []
    for name in sorted(wanted):
        need = wanted[name]
        have = held.get(name) or _Owners(need.tensor)
        if have.tensor is not need.tensor and have.tensor != need.tensor:
            raise PlanError(f"{name}: was {_facts(have.tensor)}, and is {_facts(need.tensor)} in the new generation")
        key = (need.tensor.shape, *have.key(), *need.key())
        entry = patterns.get(key)
        if entry is None:
            entry = patterns[key] = (len(patterns), _match(have, need))
        tensors.append((need.tensor, entry[0]))
    return Coverage(tuple(pattern for _, pattern in patterns.values()), tuple(tensors))


class _Owners:
    """All shards of one tensor in a generation, by worker."""

    __slots__ = ("boxes", "tensor", "workers")

    def __init__(self, tensor: LogicalTensor) -> None:
        self.tensor = tensor
        self.workers: list[int] = []
        self.boxes: list[Box] = []

    def key(self) -> tuple[object, ...]:
        return tuple(self.workers), tuple([(box.offset, box.shape) for box in self.boxes])

    def by_worker(self) -> dict[int, list[Box]]:
        found: dict[int, list[Box]] = {}
        for worker, box in zip(self.workers, self.boxes, strict=True):
            found.setdefault(worker, []).append(box)
        return found


def _collect(manifests: Sequence[Manifest]) -> dict[str, _Owners]:
    found: dict[str, _Owners] = {}
    for worker, manifest in enumerate(manifests):
        for shard in manifest:
            tensor = shard.tensor
            owners = found.get(tensor.name)
            if owners is None:
                owners = found[tensor.name] = _Owners(tensor)
            elif owners.tensor is not tensor and owners.tensor != tensor:
                raise PlanError(
                    f"{tensor.name}: worker {worker} has {_facts(tensor)}, worker {owners.workers[0]} "
                    f"{_facts(owners.tensor)}"
                )
            owners.workers.append(worker)
            owners.boxes.append(shard.box)
    return found


def _match(have: _Owners, need: _Owners) -> Pattern:
    tensor = need.tensor
    _check(have)
    _check(need)
    own = have.by_worker()
    holders: dict[Box, list[int]] = {}
    for worker, box in zip(have.workers, have.boxes, strict=True):
        if box.num_elements:
            holders.setdefault(box, []).append(worker)
    distinct = sorted(holders)
    kept: list[Kept] = []
    needs: list[Need] = []
    for worker, target in zip(need.workers, need.boxes, strict=True):
        mine = sorted(own.get(worker, []))
        missing, own_parts = missing_and_kept(target, mine)
        kept.extend(Kept(worker, box, source, target) for box, source in own_parts)
        for box, sources in refine(missing, distinct):
            if not sources:
                raise MissingSourceError(
                    f"{tensor.name}: no live worker holds the box at {box.offset} of shape {box.shape}, "
                    f"which worker {worker} needs"
                )
            pairs = [(holder, source) for source in sources for holder in holders[source]]
            needs.append(Need(worker, box, target, *zip(*sorted(pairs), strict=True)))
    return Pattern(tuple(kept), tuple(needs), *(tuple(sorted(set(each.workers))) for each in (have, need)))


def missing_and_kept(target: Box, mine: Sequence[Box]) -> tuple[list[Box], list[tuple[Box, Box]]]:
    """What a worker with the old shards `mine` lacks of its new shard `target`, and what it has: (part, old shard)."""
    if target in mine:
        return [], [(target, target)]
    missing = [target] if target.num_elements else []
    kept = []
    for source in mine:
        taken, missing = _take(missing, source)
        kept += [(box, source) for box in taken]
    return missing, kept


def _take(missing: Iterable[Box], source: Box) -> tuple[list[Box], list[Box]]:
    """The part of `missing` that `source` holds, and the rest."""
    taken: list[Box] = []
    rest: list[Box] = []
    for box in missing:
        common = box.intersect(source)
        if common is None:
            rest.append(box)
        else:
            taken.append(common)
            rest.extend(subtract_box(box, common))
    return taken, rest


def refine(boxes: Sequence[Box], sources: Sequence[Box]) -> list[tuple[Box, tuple[Box, ...]]]:
    """Cut `boxes` at the borders of the sources inside them: each piece with all the sources that contain it."""
    pieces: list[tuple[Box, tuple[Box, ...]]] = [(box, ()) for box in boxes]
    for source in sources:
        cut: list[tuple[Box, tuple[Box, ...]]] = []
        for box, within in pieces:
            common = box.intersect(source)
            if common is None:
                cut.append((box, within))
            else:
                cut.append((common, (*within, source)))
                cut.extend((rest, within) for rest in subtract_box(box, common))
        pieces = cut
    return pieces


def _check(owners: _Owners) -> None:
    for worker, boxes in owners.by_worker().items():
        check_boxes(owners.tensor, boxes, worker)


def check_boxes(tensor: LogicalTensor, boxes: Sequence[Box], worker: int) -> None:
    """Raise PlanError if a box of one worker is not inside the tensor, or if two of them overlap."""
    for index, box in enumerate(boxes):
        if len(box.offset) != len(tensor.shape) or len(box.shape) != len(tensor.shape):
            raise PlanError(f"{tensor.name}: {_plain(box)} has not the {len(tensor.shape)} dims of the tensor")
        for start, extent, size in zip(box.offset, box.shape, tensor.shape, strict=True):
            if start < 0 or extent < 0 or start + extent > size:
                raise PlanError(f"{tensor.name}: {_plain(box)} is not inside the tensor's shape {tensor.shape}")
        for other in boxes[:index]:
            if box_overlap(box, other):
                raise PlanError(
                    f"{tensor.name}: worker {worker} has overlapping shards, {_plain(other)} and {_plain(box)}"
                )


def _plain(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.offset, box.shape


def _facts(tensor: LogicalTensor) -> str:
    return f"{tensor.dtype} of shape {tensor.shape}"
