"""Which records have served their time, so that a job of any length keeps few keys in etcd."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from etc_agent.parallel.generation import Generation
from etc_agent.reconfig.member import base_of
from etc_agent.reconfig.records import Current

KEPT = 1000
"""So many generations, with their history, are kept for people."""

_AT_ONCE = 20
"""Of each kind in one transaction: etcd admits 128 operations by default."""


@dataclass(frozen=True, slots=True)
class Outdated:
    """Ids of generations to remove: `generations` with their history, `acks` all acknowledgements of one."""

    generations: tuple[int, ...] = ()
    acks: tuple[int, ...] = ()


def outdated(current: Current, generations: Mapping[int, Generation], acked: Iterable[int]) -> Outdated:
    """What nobody needs any more once `current` holds. `acked`: the generations that have acknowledgements.

    Decisions need the committed and the proposed generation, the one before each, and the fresh one that they descend
    from. Workers of that one may be running, which is all that those in between were needed for.
    """
    present = [generations[id_] for id_ in (current.committed, current.proposed) if id_ in generations]
    needed = {id_ for generation in present for id_ in (generation.id, generation.previous)}
    needed |= {base_of(generation, generations) for generation in present}
    old = (id_ for id_ in generations if id_ < current.next_id - KEPT)
    return Outdated(_first(set(old) - needed), _first(set(acked) - needed))


def _first(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(ids)[:_AT_ONCE])
