"""Who is in a generation: a node's slots in it, who takes part in the change to it, and from which it descends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.records import Current


def indices(node: str, generation: Generation) -> frozenset[int]:
    """The slots of `node` that have a worker in `generation`."""
    return on_node(node, generation.placement)


def idle(node: str, num_slots: int, current: Current, generations: Mapping[int, Generation]) -> frozenset[int]:
    """The slots of `node` that neither the committed nor the proposed generation uses; none before the first."""
    if not current.committed:
        return frozenset()
    used = [generations[g] for g in (current.committed, current.proposed) if g in generations]
    return frozenset(range(num_slots)).difference(*(indices(node, generation) for generation in used))


def participants(node: str, generation: Generation, generations: Mapping[int, Generation]) -> frozenset[int]:
    """The slots of `node` that take part in the change to `generation`: those that stay, leave and join."""
    return indices(node, generation) | stayers(node, generation, generations)


def stayers(node: str, generation: Generation, generations: Mapping[int, Generation]) -> frozenset[int]:
    """The slots of `node` whose workers of the previous generation take part in the change to `generation`."""
    previous = generations.get(generation.previous)
    return (indices(node, previous) if previous else frozenset()) - on_node(node, generation.lost)


def on_node(node: str, slots: Iterable[Slot]) -> frozenset[int]:
    """Those of `slots` that are on `node`, by index."""
    return frozenset(slot.index for slot in slots if slot.node == node)


def base_of(generation: Generation, generations: Mapping[int, Generation]) -> int:
    """The fresh generation from which `generation` descends: workers started earlier belong to no present generation.

    A fresh generation is committed when it is written, so it is the newest before `generation`.
    """
    return max(other.id for other in generations.values() if other.is_fresh and other.id <= generation.id)


def committed_line(generation: Generation, generations: Mapping[int, Generation]) -> frozenset[int]:
    """`generation` and those before it, back to the fresh one or as far as there are records."""
    line = [generation.id]
    while not generation.is_fresh and generation.previous in generations:
        generation = generations[generation.previous]
        line.append(generation.id)
    return frozenset(line)
