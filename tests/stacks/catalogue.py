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

_EXACT: Final = ("--dtype", "float64")
MOE: Final = Stack("moe", start="PP1TP1DP2EP2", sizes=("DP4EP4", "DP4EP2", "3", "DP2", "DP2EP2"), options=_EXACT)

LIGHT: Final = (DDP, NANOGPT, FSDP2, HSDP, MOE)

LLAMA: Final = Stack("llama", sizes=("PP2TP2DP1", "PP1TP2DP2", "PP4TP1DP1", "PP2TP1DP2", "PP1TP1DP3"), options=_EXACT)
LLAMA_TIED: Final = Stack("llama", sizes=("PP1TP2DP2", "3", "PP1TP4DP1"), options=_EXACT)
"""The embedding is the head as well, in one stage."""

_EXACT_ADAPTERS: Final = (*_EXACT, "--adapter-dtype", "float64")
LORA_DDP: Final = Stack("lora", sizes=("4", "1", "3"), options=_EXACT_ADAPTERS)
LORA_FSDP: Final = Stack("lora", sizes=("4", "1", "3"), options=(*_EXACT_ADAPTERS, "--fsdp"))
ACCELERATE: Final = Stack("accelerate_loop", sizes=("4", "3", "1", "2"), options=_EXACT)
TRAINER: Final = Stack("trainer", sizes=("4", "3", "1", "2"), options=_EXACT, tolerance=2e-6)
"""Trainer sums the loss in float32."""

_SIZES: Final = ("PP1TP1DP4", "PP2TP2DP1", "PP4TP1DP1", "PP1TP2DP2", "PP1TP1DP1")
MEGATRON: Final = Stack("megatron_gpt", sizes=_SIZES, tolerance=2e-5, state_tolerance=1e-3)
MEGATRON_DISTRIBUTED: Final = Stack(
    "megatron_gpt", sizes=_SIZES, options=("--distributed-optimizer",), tolerance=2e-5, state_tolerance=1e-3
)
MEGATRON_BF16: Final = Stack(
    "megatron_gpt", sizes=_SIZES, options=("--distributed-optimizer", "--bf16"), tolerance=0.05, state_tolerance=0.05
)
"""In float32, or bfloat16, since Megatron's optimizers have no other; the roundings of each size add up."""

ALL: Final = (*LIGHT, LLAMA, LLAMA_TIED, LORA_DDP, LORA_FSDP, ACCELERATE, TRAINER, MEGATRON, MEGATRON_DISTRIBUTED)
