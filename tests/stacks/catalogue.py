"""The stacks of examples/."""

from __future__ import annotations

from typing import Final

from tests.stacks.harness import Stack

_STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")

DDP: Final = Stack("ddp", sizes=("4", "3", "1", "2"), options=("--dtype", "float64"), per_rank=_STATISTICS)
"""Its running statistics are those of rank 0's samples, as with DistributedDataParallel at any size."""

ALL: Final = (DDP,)
