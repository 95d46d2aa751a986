"""What the workers of a change tell each other of their old and new state.

Workers at one position of pp and tp (and of expert parallelism) have the same manifest in most models, whatever their
replica. So the first of each tells it, and the others compare (`migration.transport.alike`); who holds something else
tells that, too.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from etc_agent.control.causes import ErrorKind
from etc_agent.errors import RelayedError
from etc_agent.migration.own_plan import Described
from etc_agent.migration.transport.alike import Alike, gather_alike
from etc_agent.migration.transport.wire import Wire
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.planner.transfers.classes import ManifestClass, encode_class
from etc_agent.state.layout import Manifest
from etc_agent.worker.change.crew import Crew
from etc_agent.worker.change.state.rng import place_of
from etc_agent.worker.settings import Settings

Refusal = tuple[ErrorKind, str]
"""Why a worker cannot build its part of the next generation: kind of error, and reason."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is prepared, and by which worker."""

    generation: Generation
    previous: Generation
    crew: Crew
    settings: Settings


@dataclass(frozen=True, slots=True)
class ToldOld:
    """The old side. `said`: what the workers of each class say of it (`amending`)."""

    described: Described
    said: tuple[Mapping[str, Any], ...]

    def names(self) -> list[set[str]]:
        """Class -> its tensors."""
        return [ManifestClass.decoded(text).names() for text in self.described.texts]


@dataclass(frozen=True, slots=True)
class ToldNew:
    """The new side. `views`: names of tensors that are views of others on some worker."""

    described: Described
    views: frozenset[str]

    def names(self) -> set[str]:
        """The tensors of all workers."""
        return {name for text in self.described.texts for name in ManifestClass.decoded(text).names()}


def tell_old_side(task: Task, group: dist.ProcessGroup, held: Manifest, said: Mapping[str, Any]) -> ToldOld:
    """Collective.

    Raises:
        RuntimeError: a worker was lost, or did not come in time.
    """
    positions, places = _grid(task.crew.old_ranks, task.previous.config)
    alike, texts, others = _tell(task, group, positions, encode_class(held, places[task.crew.worker]), said)
    return ToldOld(Described(texts, alike.class_of, places), others)


def tell_new_side(
    task: Task, group: dist.ProcessGroup, needed: Manifest, views: Sequence[str], refusal: Refusal | None
) -> ToldNew:
    """Collective.

    Raises:
        RelayedError: a worker refuses; of several refusals, the one that most likely caused the others.
        RuntimeError: a worker was lost, or did not come in time.
    """
    positions, places = _grid(task.crew.next_ranks, task.generation.config)
    said = {"views": sorted(views), "refusal": refusal}
    alike, texts, others = _tell(task, group, positions, encode_class(needed, places[task.crew.worker]), said)
    kinds = list(ErrorKind)
    refusals = [row["refusal"] for row in others if row["refusal"] is not None]
    if refusals:
        kind, error = min(refusals, key=lambda refusal: kinds.index(refusal[0]))
        raise RelayedError(error, kind)
    return ToldNew(Described(texts, alike.class_of, places), frozenset(name for row in others for name in row["views"]))


def _tell(
    task: Task, group: dist.ProcessGroup, positions: Sequence[object], manifest: bytes, said: Mapping[str, Any]
) -> tuple[Alike, tuple[bytes, ...], tuple[Mapping[str, Any], ...]]:
    mine = json.dumps(said, separators=(",", ":"), sort_keys=True).encode() + b"\n" + manifest
    timeout = datetime.timedelta(seconds=task.settings.switch_timeout_s)
    alike = gather_alike(Wire(group), mine, positions, timeout)
    parts = [value.partition(b"\n") for value in alike.values]
    return alike, tuple(text for _, _, text in parts), tuple(json.loads(row) for row, _, _ in parts)


def _grid(
    ranks: Sequence[int | None], config: ParallelConfig
) -> tuple[list[object], tuple[str | None, ...]]:
    """Worker -> its position, which decides its manifest in most models; and its place, which its stream is named
    after. Neither where it has no rank."""
    positions: list[object] = []
    places: list[str | None] = []
    for rank in ranks:
        if rank is None:
            positions.append(None)
            places.append(None)
            continue
        at = config.coordinate(rank)
        positions.append((at.pp, at.tp, config.expert_part(rank)))
        places.append(place_of(at))
    return positions, tuple(places)
