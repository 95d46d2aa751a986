"""The generation that a worker trains in."""

from __future__ import annotations

from dataclasses import dataclass

from etc_agent.integrations.native import TrainState
from etc_agent.worker.context import ParallelContext
from etc_agent.worker.vote import Vote
from etc_agent.worker.world.swap import World


@dataclass(slots=True, eq=False)
class LiveGeneration:
    """The generation that a worker trains in."""

    id: int
    world: World
    vote: Vote | None
    state: TrainState
    parallel: ParallelContext
