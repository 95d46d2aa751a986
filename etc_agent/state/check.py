"""Whether a layout holds every logical tensor, all of it, and no rank anything twice."""

from __future__ import annotations

from collections.abc import Iterable

from etc_agent.state.algebra import box_overlap, missing_box
from etc_agent.state.boxes import Box, whole
from etc_agent.state.layout import Layout, LogicalTensor


class LayoutError(ValueError):
    """A layout that loses or doubles a part of a tensor; the message names both."""


def check_layout(layout: Layout, expected: Iterable[LogicalTensor] | None = None) -> None:
    """Refuse a layout whose shards do not cover their tensors (and those of `expected`) exactly.

    Raises:
        LayoutError: a part of a tensor is held by no rank, or twice by one, or reaches outside the tensor.
    """
    held: dict[LogicalTensor, dict[Box, None]] = {tensor: {} for tensor in expected or ()}
    for rank, manifest in enumerate(layout):
        own: dict[LogicalTensor, list[Box]] = {}
        for shard in manifest:
            for other in own.setdefault(shard.tensor, []):
                if box_overlap(other, shard.box):
                    raise LayoutError(f"{shard.tensor.name}: rank {rank} holds {other} and {shard.box}, which overlap")
            own[shard.tensor].append(shard.box)
            held.setdefault(shard.tensor, {})[shard.box] = None
    for tensor, boxes in held.items():
        full = whole(tensor.shape)
        for box in boxes:
            if box.num_elements and box.intersect(full) != box:
                raise LayoutError(f"{tensor.name}: {box} reaches outside its shape {tensor.shape}")
        missing = missing_box(full, list(boxes))
        if missing is not None:
            raise LayoutError(f"{tensor.name}: no rank holds the box at {missing.offset} of shape {missing.shape}")
