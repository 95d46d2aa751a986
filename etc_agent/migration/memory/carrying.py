"""Carrying: parts of old host tensors that stay on their worker in `release` mode have their pages moved, not copied.

A matrix that is sharded by rows before and after a change keeps most of its rows on the same worker. Their pages can be
moved to the addresses of the new tensor (`recycling`) if each byte has the same offset within its page at both ends, so
the start of the new tensor is chosen accordingly. The bytes before the first and after the last whole page are copied.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from dataclasses import dataclass

import torch

from etc_agent.migration.memory.contiguous import is_contiguous_in
from etc_agent.migration.schedule import Schedule
from etc_agent.planner.transfers.plan import Refer
from etc_agent.state.boxes import Box
from etc_agent.state.layout import Shard

_SMALLEST_BYTES = 256 << 10
_ALIGN_BYTES = 64
"""Alignment of a tensor's first byte, as in PyTorch's allocator."""


@dataclass(frozen=True, slots=True)
class Carry:
    """`num_bytes` that begin at the byte `source_start` of the old tensor and at `target_start` of the new one. The new
    tensor has to begin `shift` bytes into a page."""

    refer: Refer
    source_start: int
    target_start: int
    num_bytes: int
    shift: int


def refers_to_carry(schedule: Schedule) -> dict[Shard, Refer]:
    """New shard -> the largest part of it that is contiguous in both tensors and is not sent to another worker."""
    sent: dict[Shard, list[Box]] = defaultdict(list)
    for scheduled in schedule.rounds:
        for message in scheduled.sends:
            for transfer in message.transfers:
                sent[Shard(transfer.tensor, transfer.source_box)].append(transfer.box)
    found: dict[Shard, Refer] = {}
    for refer in schedule.refers:
        if refer.is_whole or refer.box.num_elements * refer.tensor.itemsize < _SMALLEST_BYTES:
            continue
        if not is_contiguous_in(refer.box, refer.source_box) or not is_contiguous_in(refer.box, refer.target_box):
            continue
        if any(refer.box.intersect(box) for box in sent[Shard(refer.tensor, refer.source_box)]):
            continue
        target = Shard(refer.tensor, refer.target_box)
        if target not in found or found[target].box.num_elements < refer.box.num_elements:
            found[target] = refer
    return found


def carry_of(refer: Refer, source: torch.Tensor) -> Carry | None:
    """How to carry `refer` out of its old tensor; None where the new tensor could not be aligned to it."""
    if source.device.type != "cpu" or not source.is_contiguous():
        return None
    itemsize = refer.tensor.itemsize
    source_start, target_start = (
        _first_element(refer.box, outer) * itemsize for outer in (refer.source_box, refer.target_box)
    )
    shift = (source.data_ptr() + source_start - target_start) % mmap.PAGESIZE
    if shift % _ALIGN_BYTES:
        return None
    return Carry(refer, source_start, target_start, refer.box.num_elements * itemsize, shift)


def _first_element(box: Box, outer: Box) -> int:
    """Where `box` begins in a row-major array that holds `outer`."""
    index = 0
    for start, origin, size in zip(box.offset, outer.offset, outer.shape, strict=True):
        index = index * size + start - origin
    return index
