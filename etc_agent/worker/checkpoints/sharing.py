"""Which rank writes which box, so that every element of every tensor is written once."""

from __future__ import annotations

from collections.abc import Sequence

from etc_agent.errors import EtcError
from etc_agent.state.algebra import missing_box, subtract_all
from etc_agent.state.boxes import Box, whole
from etc_agent.state.layout import LogicalTensor, Manifest, Shard


def shared(offers: Sequence[Manifest]) -> list[list[Shard]]:
    """What each rank writes of what it offers, cut where boxes of different ranks overlap. `offers`: by rank.

    Replicas go to the rank that has the fewest bytes to write so far, the largest shards first.

    Raises:
        EtcError: two ranks offer one name with different shapes or dtypes, or a part of a tensor is offered by no rank.
    """
    holders: dict[LogicalTensor, dict[Box, list[int]]] = {}
    for rank, offer in enumerate(offers):
        for shard in offer:
            holders.setdefault(shard.tensor, {}).setdefault(shard.box, []).append(rank)
    _check_names(list(holders))
    written: list[list[Shard]] = [[] for _ in offers]
    loads = [0] * len(offers)
    for tensor in sorted(holders, key=_num_bytes, reverse=True):
        taken: list[Box] = []
        boxes = holders[tensor]
        for box in sorted(boxes, key=lambda each: each.num_elements, reverse=True):
            pieces = subtract_all(box, taken) if taken else [box]
            if not box.num_elements and taken:
                continue
            writer = min(boxes[box], key=lambda rank: (loads[rank], rank))
            for piece in pieces:
                shard = Shard(tensor, piece)
                written[writer].append(shard)
                loads[writer] += shard.num_bytes
            taken += pieces
        missing = missing_box(whole(tensor.shape), taken)
        if missing is not None:
            raise EtcError(f"{tensor.name}: no rank has the box at {missing.offset} of shape {missing.shape}")
    return written


def _check_names(tensors: Sequence[LogicalTensor]) -> None:
    known: dict[str, LogicalTensor] = {}
    for tensor in tensors:
        other = known.setdefault(tensor.name, tensor)
        if other != tensor:
            raise EtcError(
                f"{tensor.name} is {other.dtype} {other.shape} on one rank and {tensor.dtype} {tensor.shape} on another"
            )


def _num_bytes(tensor: LogicalTensor) -> int:
    return Shard(tensor, whole(tensor.shape)).num_bytes
