"""Logical tensors, the shards that ranks hold of them, and layouts of whole jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from etc_agent.state.boxes import Box


@dataclass(frozen=True, slots=True, order=True)
class LogicalTensor:
    """One named tensor of the unsharded model or optimizer.

    `dtype` is torch's name without the prefix (``float32``); `itemsize` is in bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """The part of a logical tensor that one rank holds or needs, as one contiguous local array of the box's shape."""

    tensor: LogicalTensor
    box: Box

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.tensor.itemsize


Manifest = tuple[Shard, ...]
"""All shards of one rank. Several shards of one tensor are legal, and never overlap."""

def by_tensor(shards: Iterable[Shard]) -> dict[LogicalTensor, list[Shard]]:
    """The shards of each tensor."""
    found: dict[LogicalTensor, list[Shard]] = {}
    for shard in shards:
        found.setdefault(shard.tensor, []).append(shard)
    return found


def shard_around(shards: Mapping[LogicalTensor, Sequence[Shard]], part: Shard) -> Shard:
    """The one of `shards` (`by_tensor`) in which `part` lies; there is one."""
    candidates = shards[part.tensor]
    return next((each for each in candidates if each.box.intersect(part.box) == part.box), candidates[0])


Layout = tuple[Manifest, ...]
"""Virtual rank -> what it holds."""
