"""Random streams: the states of torch's generators, one per grid coordinate.

A coordinate that exists in both the previous and the next generation keeps its stream bit for bit: the stream is a
logical tensor and moves with the rest of the state. A coordinate that is new derives its stream from (seed, generation,
rank). Streams are never shared between coordinates.
"""

from __future__ import annotations

import hashlib

import torch

from etc_agent.integrations.native import rng_state
from etc_agent.parallel.config import ParallelConfig
from etc_agent.state.boxes import whole
from etc_agent.state.layout import LogicalTensor, Shard


def derived_seed(seed: int, generation: int, rank: int) -> int:
    """The seed of a new stream, in 0 .. 2**63 - 1."""
    digest = hashlib.sha256(f"etc-run stream {seed} {generation} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def start_stream(seed: int, generation: int, rank: int) -> None:
    """Set torch's generators, the host's and the device's, to the start of a new stream."""
    torch.manual_seed(derived_seed(seed, generation, rank))


def carried_stream(rank: int, config: ParallelConfig, other: ParallelConfig, device: torch.device) -> Shard | None:
    """The stream of `rank` in `config` as a shard that migrates, or None where `other` lacks its coordinate.

    `config` is either side of the change and `other` the opposite one.
    """
    at = config.coordinate(rank)
    if at.pp >= other.pp or at.dp >= other.dp or at.tp >= other.tp:
        return None
    num_bytes = rng_state(device).numel()
    name = f"rng.pp{at.pp}.dp{at.dp}.tp{at.tp}"
    return Shard(LogicalTensor(name, (num_bytes,), "uint8", 1), whole((num_bytes,)))
