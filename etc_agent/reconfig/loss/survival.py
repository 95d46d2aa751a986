"""What a generation can lose without losing state: whether every part of it is on another worker, or another node."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot


@dataclass(frozen=True, slots=True)
class Survival:
    """Whether the job can lose any one `worker`, and any one `node`, and keep all state.

    `known_by`: ``grid``, the degrees alone, which do not tell of state that is split over dp, as ZeRO's optimizers do.
    The model's own account of who holds what is in `loss.outlook`.
    """

    worker: bool
    node: bool
    known_by: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def by_grid(generation: Generation) -> Survival:
    """From the parallel config: ranks that differ only along dp and cp hold the same state, experts apart."""
    config = generation.config
    held = []
    for rank, slot in enumerate(generation.placement):
        at = config.coordinate(rank)
        held.append(((at.pp, at.tp, config.expert_part(rank)), slot))
    return _survival(held, "grid")


def _survival(held: Iterable[tuple[Hashable, Slot]], known_by: str) -> Survival:
    first: dict[Hashable, Slot] = {}
    on_workers: set[Hashable] = set()
    on_nodes: set[Hashable] = set()
    for part, slot in held:
        one = first.setdefault(part, slot)
        if one != slot:
            on_workers.add(part)
        if one.node != slot.node:
            on_nodes.add(part)
    return Survival(len(on_workers) == len(first), len(on_nodes) == len(first), known_by)
