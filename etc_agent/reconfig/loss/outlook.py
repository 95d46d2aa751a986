"""What the job can lose now and go on without a restart, in one line for people."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Self

from etc_agent.control.redundancy import Redundancy, Scheme
from etc_agent.parallel.generation import Generation
from etc_agent.planner.copies.keepers import Survival, survival, survival_with, with_rebuilt
from etc_agent.planner.copies.parity import blocks_of
from etc_agent.reconfig.loss.replicas import unheld
from etc_agent.state.layout import Layout


def node_numbers(generation: Generation) -> list[int]:
    """Rank -> the number of its node in the generation."""
    numbers = {node: number for number, node in enumerate(generation.nodes)}
    return [numbers[slot.node] for slot in generation.placement]


def unheld_with_copies(
    layout: Layout, generation: Generation, redundancy: Redundancy, lost: Collection[int]
) -> str | None:
    """As `replicas.unheld`, where what survivors can give back from copies or parity counts as held, too."""
    name = unheld(layout, lost)
    if name is None or redundancy.scheme is Scheme.NONE:
        return name
    blocks = blocks_of(redundancy.scheme, layout, node_numbers(generation))
    return unheld(with_rebuilt(layout, blocks, lost), lost)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a job can lose in one generation: `without` copies, and `with_copies` once a set of them is complete."""

    generation: Generation
    redundancy: Redundancy
    without: Survival
    with_copies: Survival

    @classmethod
    def of(cls, layout: Layout, generation: Generation, redundancy: Redundancy) -> Self:
        """`layout`: of the generation's config."""
        nodes = node_numbers(generation)
        blocks = blocks_of(redundancy.scheme, layout, nodes)
        return cls(generation, redundancy, survival(layout, nodes), survival_with(layout, blocks, nodes))

    def in_words(self, copied: int | None) -> str:
        """`copied`: the step of the newest complete copy set, None where there is none."""
        config = self.generation.config
        if config.num_ranks == 1:
            return "nothing: there is one worker"
        if self.redundancy.scheme is Scheme.NONE and self.without == Survival(0, 0):
            return f"nothing: {config}, no redundancy"
        if self.with_copies == self.without:
            return str(self.without)
        if copied is None:
            return f"{self.without} until the first copies are complete, then {self.with_copies}"
        return f"{self.with_copies} (back to step {copied}, the last copies)"

    def to_json(self, copied: int | None) -> dict[str, Any]:
        """For `status`: whether any one `worker` and any one `node` can be lost now, and the line for people."""
        now = self.without if copied is None else self.with_copies
        is_alone = self.generation.config.num_ranks == 1
        return {
            "worker": now.num_workers > 0 and not is_alone,
            "node": now.num_nodes > 0 and not is_alone,
            "known_by": "layout",
            "said": self.in_words(copied),
        }
