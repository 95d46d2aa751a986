"""ParallelContext: what `build` and the training loop know about their position in the job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from etc_agent.errors import EtcError
from etc_agent.parallel.config import Coordinate, ParallelConfig
from etc_agent.worker.data.division import GlobalBatch
from etc_agent.worker.world.swap import World


@dataclass(frozen=True, slots=True, eq=False)
class ParallelContext:
    """This process's position in one generation.

    `mesh` has the axes ``("pp", "dp", "cp", "tp")``; `rank` is the virtual rank, which is also torch.distributed's rank
    while the generation is in force. `device` is where the state lives; it never changes. `global_batch` is in samples.
    """

    config: ParallelConfig
    mesh: DeviceMesh
    rank: int
    device: torch.device
    generation: int
    global_batch: int
    experts: DeviceMesh | None = field(default=None, repr=False)

    @classmethod
    def of(cls, world: World, device: torch.device, generation: int, global_batch: int) -> Self:
        """This process's position in `world`."""
        return cls(world.config, world.mesh, world.rank, device, generation, global_batch, world.expert_mesh)

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The same ranks with the axes ``("pp", "edp", "ep", "tp")``: dp x cp, divided into ep neighbours that share
        the experts among them, and edp ranks that hold the same experts. With ep=1, edp is dp x cp as one axis.

        Raises:
            EtcError: this context was made by hand, without one.
        """
        if self.experts is None:
            raise EtcError("this ParallelContext has no expert_mesh: it was not made by a session")
        return self.experts

    @property
    def coordinate(self) -> Coordinate:
        return self.config.coordinate(self.rank)

    @property
    def local_batch(self) -> int:
        """Samples of each step that this dp rank trains on."""
        return len(GlobalBatch(self.global_batch).ids(0, self.coordinate.dp, self.config.dp))
