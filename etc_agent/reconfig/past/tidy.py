"""Which records are no longer needed, so that a job of any length keeps few keys in etcd."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from etc_agent.parallel.generation import Generation
from etc_agent.reconfig.known.parts import base_of
from etc_agent.reconfig.known.records import Current

KEPT = 1000
"""How many generations, with their history, are kept for people to look at."""

_AT_ONCE = 20
"""How many of each kind are removed in one transaction: etcd admits 128 operations by default."""


@dataclass(frozen=True, slots=True)
class Outdated:
    """Ids of generations to remove: `generations` with their history, and `acks`: all acknowledgements of a
    generation."""

    generations: tuple[int, ...] = ()
    acks: tuple[int, ...] = ()


def outdated(current: Current, generations: Mapping[int, Generation], acked: Iterable[int]) -> Outdated:
    """The records that are not needed once `current` is written. `acked`: the generations that have acknowledgements.

    Decisions need the committed and the proposed generation, the one before each, and the fresh one from which they
    descend. The generations in between were only needed while workers started for them were running.
    """
    present = [generations[id_] for id_ in (current.committed, current.proposed) if id_ in generations]
    needed = {id_ for generation in present for id_ in (generation.id, generation.previous)}
    needed |= {base_of(generation, generations) for generation in present}
    old = (id_ for id_ in generations if id_ < current.next_id - KEPT)
    return Outdated(_first(set(old) - needed), _first(set(acked) - needed))


def _first(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(ids)[:_AT_ONCE])
