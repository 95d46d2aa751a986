"""The result of a preparation, which the switch uses."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from etc_agent.migration.modes import Choice
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.planner.transfers.plan import MigrationPlan
from etc_agent.state.layout import Shard
from etc_agent.worker.change.crew import Crew
from etc_agent.worker.change.groups import ChangeConnections
from etc_agent.worker.change.modes.mode import Mode
from etc_agent.worker.change.state.holdings import Holdings
from etc_agent.worker.live import LiveGeneration


@dataclass(slots=True, eq=False)
class PreparedGeneration:
    """Everything that the switch needs. `next`: the new generation, None on a worker that leaves. In `release` mode its
    model is on the meta device until its tensors have arrived. `old_stream`, `new_stream`: the worker's random stream
    among its old and its new tensors, the old one with a buffer to read it into; None where it is not carried over.

    `connections`: of the change and of the new generation. `holdings`: what this worker held during the preparation,
    None where it joins. `has_values`: whether the optimizer of any worker keeps Python values for some parameters.
    `moved_bytes`: bytes sent between workers, over all workers.
    """

    generation: Generation
    previous: Generation
    slot: Slot
    crew: Crew
    group: dist.ProcessGroup
    plan: MigrationPlan
    moved_bytes: int
    choice: Choice
    mode: Mode
    next: LiveGeneration | None
    holdings: Holdings | None
    has_values: bool
    old_stream: tuple[Shard, torch.Tensor] | None
    new_stream: Shard | None
    connections: ChangeConnections
    phases_ms: dict[str, float] = field(default_factory=dict)

    def close(self) -> None:
        """Drop everything, including connections; the other workers' next operation on them fails."""
        if self.next is not None:
            self.next.world.close()
        self.next = None
        self.holdings = None
        self.mode.close()
        self.group = None  # type: ignore[assignment]
