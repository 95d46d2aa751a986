"""The stacks of examples/."""

from __future__ import annotations

from typing import Final

from tests.stacks.harness import Stack

_STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")

DDP: Final = Stack("ddp", sizes=("4", "3", "1", "2"), options=("--dtype", "float64"), per_rank=_STATISTICS)
"""Its running statistics are those of rank 0's samples, as with DistributedDataParallel at any size."""

NANOGPT: Final = Stack("nanogpt", sizes=("4", "1", "3"), options=("--dtype", "float64"), compared_with="itself")
"""Under torchrun every rank draws its own windows, so that the data differ from size to size: compared with the elastic
script at a fixed size."""

_FLOAT64: Final = ("--dtype", "float64", "--compute-dtype", "float64", "--reduce-dtype", "float64")
FSDP2: Final = Stack("fsdp2", start="PP1TP2DP2", sizes=("DP4", "TP2DP1", "TP1DP3"), options=_FLOAT64)
HSDP: Final = Stack("fsdp2", start="PP1TP1DP4", sizes=("DP2", "TP2DP2", "DP4"), options=(*_FLOAT64, "--replicas", "2"))

LIGHT: Final = (DDP, NANOGPT, FSDP2, HSDP)
ALL: Final = LIGHT
