"""ParallelContext: what `build` and the training loop know about their position in the job."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from etc_agent.errors import ConfigRefusedError
from etc_agent.parallel.config import Coordinate, ParallelConfig


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
        return self.global_batch // self.config.dp


def check_global_batch(global_batch: int, config: ParallelConfig) -> None:
    """Check that every dp rank gets the same number of samples.

    Raises:
        ConfigRefusedError: dp does not divide the global batch.
    """
    if global_batch % config.dp:
        fitting = [str(dp) for dp in range(1, global_batch + 1) if global_batch % dp == 0]
        raise ConfigRefusedError(
            f"{config}: a global batch of {global_batch} cannot be divided over dp={config.dp}; "
            f"choose dp from {', '.join(fitting)}"
        )


def local_sample_ids(step: int, context: ParallelContext) -> range:
    """The ids of step `step`'s samples that fall to this dp rank: its part of ``step*GB .. (step+1)*GB - 1``."""
    first = step * context.global_batch + context.coordinate.dp * context.local_batch
    return range(first, first + context.local_batch)
