"""ParallelContext: what `build` and the training loop know about their position in the job."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from etc_agent.parallel.config import Coordinate, ParallelConfig
from etc_agent.worker.data.division import GlobalBatch


@dataclass(frozen=True, slots=True, eq=False)
class ParallelContext:
    """This process's position in one generation.

    `mesh` has the axes ``("pp", "dp", "tp")``; `rank` is the virtual rank, which is also torch.distributed's rank while
    the generation is in force. `device` is where the state lives; it never changes. `global_batch` is in samples.
    """

    config: ParallelConfig
    mesh: DeviceMesh
    rank: int
    device: torch.device
    generation: int
    global_batch: int

    @property
    def coordinate(self) -> Coordinate:
        return self.config.coordinate(self.rank)

    @property
    def local_batch(self) -> int:
        """Samples of each step that this dp rank trains on."""
        return len(GlobalBatch(self.global_batch).ids(0, self.coordinate.dp, self.config.dp))
