"""After a loss: what the survivors give in place of the lost workers, from the blocks that they keep."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from etc_agent.state.layout import Shard
from etc_agent.worker.change.state.rescued import NOTHING, Rescued
from etc_agent.worker.change.state.rng import STREAM_PREFIX
from etc_agent.worker.redundancy.copy_set import CopySet
from etc_agent.worker.redundancy.sums import receive_onto, send

_TAG: Final = 0


@dataclass(frozen=True, slots=True, eq=False)
class Survivors:
    """The workers that have survived a loss. `group`: with all of them, used for nothing else meanwhile. `workers`:
    rank -> its number in the group. `lost`: the ranks that have not survived."""

    group: dist.ProcessGroup
    workers: Mapping[int, int]
    lost: Collection[int]


def rescue(copies: CopySet | None, survivors: Survivors, device: torch.device) -> Rescued:
    """What this worker gives in place of the lost ones, once all survivors have gone back to their `copies` of one
    step; nothing if they have not. The survivors among a block's owners send their pieces to its keeper. The block
    itself stays as it is, since more workers may be lost before the recovery is over. Collective over the survivors.

    Args:
        device: where the state lives; random streams stay on the host.

    Raises:
        RuntimeError: a survivor was lost.
    """
    if copies is None:
        return NOTHING
    lost = {number: piece.owner for number, block in enumerate(copies.blocks)
            if (piece := block.rebuilt(survivors.lost)) is not None}
    works: list[Any] = []
    for number in lost:
        if number in copies.layout.sent:
            keeper = survivors.workers[copies.blocks[number].keeper]
            works += send(survivors.group, copies.piece(number), keeper, _TAG)
    tensors: dict[Shard, torch.Tensor] = {}
    for number, owner in lost.items():
        if number in copies.kept:
            for part, tensor in _rebuilt(copies, number, owner, survivors).items():
                is_stream = part.tensor.name.startswith(STREAM_PREFIX)
                tensors[part] = tensor.to("cpu" if is_stream else device, copy=True)
    for work in works:
        work.wait()
    values = {owner: json.loads(said) for owner, said in copies.kept_values.items() if owner in survivors.lost}
    return Rescued(tensors, values)


def _rebuilt(copies: CopySet, number: int, lost: int, survivors: Survivors) -> dict[Shard, torch.Tensor]:
    """The parts of the `lost` rank that a block kept here gives back, as views of host memory."""
    pieces, total = copies.kept_layouts[number].pieces, copies.kept[number]
    others = {owner: places for owner, places in pieces.items() if owner != lost}
    if others:
        total = total.clone()
    for owner, places in others.items():
        receive_onto(survivors.group, total[: places.num_bytes], survivors.workers[owner], _TAG)
    return {place.part: place.tensor(total) for place in pieces[lost].places}
