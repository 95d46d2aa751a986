"""Logical tensors, the shards that ranks hold of them, and layouts of whole jobs."""

from __future__ import annotations

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

Layout = tuple[Manifest, ...]
"""Virtual rank -> what it holds."""
