"""Random streams: the states of torch's generators, one per grid coordinate.

A coordinate that exists in both the previous and the next generation keeps its stream bit for bit: the stream is a
logical tensor and moves with the rest of the state. A coordinate that is new derives its stream from (seed, generation,
rank). Streams are never shared between coordinates.
"""

from __future__ import annotations

import hashlib
from typing import Final

import torch

from etc_agent.integrations.host_state import rng_state
from etc_agent.parallel.config import Coordinate, ParallelConfig
from etc_agent.state.boxes import whole
from etc_agent.state.layout import LogicalTensor, Shard

STREAM_PREFIX: Final = "rng."
"""Of the names of streams as logical tensors."""


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
    return stream_of(at, rng_state(device))


def stream_of(at: Coordinate, state: torch.Tensor) -> Shard:
    """The stream of the coordinate `at` as a shard; `state`: of any stream on such a device."""
    return Shard(LogicalTensor(f"{STREAM_PREFIX}{place_of(at)}", (len(state),), "uint8", 1), whole((len(state),)))


def place_of(at: Coordinate) -> str:
    """The end of a stream's name."""
    return f"pp{at.pp}.dp{at.dp}.tp{at.tp}"
