"""What workers say to each other about copies, over a raw gloo group of their own: plans, and one copy set's pieces."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from etc_agent.control.redundancy import Scheme
from etc_agent.planner.copies.keepers import Block, Piece, survival_with
from etc_agent.planner.copies.parity import blocks_of
from etc_agent.state.encoding import decode_manifest, encode_manifest
from etc_agent.state.layout import Layout, Manifest
from etc_agent.worker.change.exchange import gather_json
from etc_agent.worker.change.state.rng import STREAM_PREFIX
from etc_agent.worker.redundancy.copy_set import CopySet
from etc_agent.worker.redundancy.layout import BlockLayout, OwnLayout
from etc_agent.worker.redundancy.sums import receive, receive_onto, send

_log = logging.getLogger(__name__)

_NOT_TAKEN: Final = -1


class _Tag(enum.IntEnum):
    HEADER = 0
    PIECE = 1
    VALUES = 2


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Who keeps what, equal on every rank. `manifests`: rank -> all that it holds, its random stream included. `nodes`:
    rank -> the number of its node. `newest`: the number of the newest copy set that every rank has completed."""

    manifests: Layout
    nodes: tuple[int, ...]
    blocks: tuple[Block, ...]
    newest: int

    @property
    def is_needed(self) -> bool:
        """Whether a block protects more than random streams."""
        return any(without_streams(piece.parts) for block in self.blocks for piece in block.pieces)

    def layouts(self, rank: int) -> tuple[OwnLayout, Mapping[int, BlockLayout]]:
        """The layouts of a copy set on `rank`: of its own state, and number of a block -> of what it keeps."""
        pieces = {
            number: piece.parts
            for number, block in enumerate(self.blocks) for piece in block.pieces if piece.owner == rank
        }
        kept = {number: BlockLayout.of(block) for number, block in enumerate(self.blocks) if block.keeper == rank}
        return OwnLayout.of(self.manifests[rank], pieces), kept

    def in_words(self) -> str:
        """What the copies are good for, for people."""
        tensors = tuple(without_streams(manifest) for manifest in self.manifests)
        blocks = tuple(Block(block.keeper, _without_streams(block.pieces)) for block in self.blocks)
        loss = survival_with(tensors, [block for block in blocks if block.pieces], self.nodes)
        one_node = "" if len(set(self.nodes)) > 1 else " (all workers are on one node, and so are the copies)"
        return f"the loss of {loss} costs no state{one_node}"


def without_streams(manifest: Manifest) -> Manifest:
    """A new worker can start a new random stream, so a lost one does not count as lost state."""
    return tuple(shard for shard in manifest if not shard.tensor.name.startswith(STREAM_PREFIX))


def _without_streams(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    rest = (Piece(piece.owner, without_streams(piece.parts)) for piece in pieces)
    return tuple(piece for piece in rest if piece.parts)


def make_plan(group: dist.ProcessGroup, scheme: Scheme, manifest: Manifest, node: int, newest: int) -> CopyPlan:
    """Agree on who keeps what. Collective over the group. `newest`: of this rank's own complete copy sets.

    Raises:
        RuntimeError: a rank was lost.
    """
    rows = gather_json(group, {"manifest": encode_manifest(manifest), "node": node, "newest": newest})
    manifests = tuple(decode_manifest(row["manifest"]) for row in rows)
    nodes = tuple(row["node"] for row in rows)
    return CopyPlan(manifests, nodes, blocks_of(scheme, manifests, nodes), min(row["newest"] for row in rows))


def exchange(group: dist.ProcessGroup, copies: CopySet, *, is_taken: bool) -> bool:
    """Send this rank's pieces of a copy set to their keepers, and receive what it keeps; returns whether its share of
    the set is complete. Its own values go with its first piece. `is_taken`: False where this rank could not copy its
    state, and so sends nothing but that.

    Raises:
        RuntimeError: a rank was lost.
    """
    works: list[Any] = []
    values = torch.frombuffer(bytearray(copies.own_values.encode()), dtype=torch.uint8) if is_taken else _NOTHING
    for number in copies.layout.sent:
        keeper = copies.blocks[number].keeper
        if not is_taken:
            works.append(group.send([_header(copies.number, _NOT_TAKEN)], keeper, _Tag.HEADER))
            continue
        works.append(group.send([_header(copies.number, len(values))], keeper, _Tag.HEADER))
        works += send(group, copies.piece(number), keeper, _Tag.PIECE)
        if len(values):
            works.append(group.send([values], keeper, _Tag.VALUES))
            values = _NOTHING
    is_complete = is_taken
    for number, layout in copies.kept_layouts.items():
        is_complete = _receive_block(group, layout, copies.kept[number], copies) and is_complete
    for work in works:
        work.wait()
    return is_complete


def _receive_block(group: dist.ProcessGroup, layout: BlockLayout, buffer: torch.Tensor, copies: CopySet) -> bool:
    """Receive one block; returns whether all of its owners have sent their pieces."""
    is_complete, is_first = True, True
    for owner, places in layout.pieces.items():
        header = _header(0, 0)
        group.recv([header], owner, _Tag.HEADER).wait()
        number, length = header.tolist()
        assert number == copies.number, "every rank takes the same copy set"
        if length == _NOT_TAKEN:
            is_complete = False
            continue
        piece = buffer[: places.num_bytes]
        if is_first:
            receive(group, piece, owner, _Tag.PIECE)
            buffer[places.num_bytes :].zero_()
            is_first = False
        else:
            receive_onto(group, piece, owner, _Tag.PIECE)
        if length:
            values = torch.zeros(length, dtype=torch.uint8, device="cpu")
            group.recv([values], owner, _Tag.VALUES).wait()
            copies.kept_values[owner] = values.numpy().tobytes().decode()
    return is_complete


_NOTHING: Final = torch.empty(0, dtype=torch.uint8, device="cpu")


def _header(number: int, length: int) -> torch.Tensor:
    """`number`: of the copy set. `length`: bytes of the values that follow the piece, or `_NOT_TAKEN`."""
    return torch.tensor([number, length], dtype=torch.int64, device="cpu")
