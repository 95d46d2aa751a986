"""The generation that a worker trains in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from etc_agent.integrations.train_state import TrainState
from etc_agent.worker.context import ParallelContext
from etc_agent.worker.redundancy.copier import Copier
from etc_agent.worker.vote import Vote
from etc_agent.worker.world.connections import Connections
from etc_agent.worker.world.swap import World


@dataclass(slots=True, eq=False)
class LiveGeneration:
    """The generation that a worker trains in. `side`: the connections of its votes and copies. `copies`: the group for
    copies of the state, None where none are made; `copier`: what uses it, once the generation is in force. `model`:
    what the script trains with (`activation`), likewise."""

    id: int
    world: World
    vote: Vote | None
    side: Connections
    state: TrainState
    parallel: ParallelContext
    copies: dist.ProcessGroup | None = None
    copier: Copier | None = None
    model: Any = None

    def __post_init__(self) -> None:
        if self.model is None:
            self.model = self.state.model

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Every process group of this generation, those included that the script has made in its world."""
        own = [self.vote.group] if self.vote is not None else []
        return [*self.world.contents.pg_names, *own, *([self.copies] if self.copies is not None else [])]

    def cut(self) -> None:
        """Have every operation with peers fail, in every thread. The votes first: a script that catches the error of a
        collective of its own must not come to vote with the others."""
        self.side.cut()
        self.world.cut()
