"""What workers say to each other about copies, over a raw gloo group of their own: plans, and one copy set's parts."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from etc_agent.planner.keepers import PeerCopy, kept_by, parts_of, peer_copies, survival, with_copies
from etc_agent.state.encoding import decode_manifest, encode_manifest
from etc_agent.state.layout import Layout, Manifest
from etc_agent.worker.change.exchange import gather_json
from etc_agent.worker.change.state.rng import STREAM_PREFIX
from etc_agent.worker.redundancy.copy_set import CopySet
from etc_agent.worker.redundancy.layout import OwnLayout, Places

_log = logging.getLogger(__name__)


_NOT_TAKEN: Final = -1


class _Tag(enum.IntEnum):
    HEADER = 0
    PARTS = 1
    VALUES = 2


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Who keeps what, equal on every rank. `manifests`: rank -> all that it holds, its random stream included. `nodes`:
    rank -> the number of its node. `newest`: the number of the newest copy set that every rank has completed."""

    manifests: Layout
    nodes: tuple[int, ...]
    copies: tuple[PeerCopy, ...]
    newest: int

    @property
    def is_needed(self) -> bool:
        """Whether a copy protects more than random streams."""
        return any(not part.tensor.name.startswith(STREAM_PREFIX) for copy in self.copies for part in copy.parts)

    def layouts(self, rank: int) -> tuple[OwnLayout, dict[int, Places]]:
        """The layouts of a copy set on `rank`: of its own state, and owner -> of what it keeps."""
        kept = {owner: Places.of(parts) for owner, parts in kept_by(self.copies, rank).items()}
        return OwnLayout.of(self.manifests[rank], parts_of(self.copies, rank)), kept

    def keeper_of(self, rank: int) -> int | None:
        return next((copy.keeper for copy in self.copies if copy.owner == rank), None)

    def in_words(self) -> str:
        """What the copies are good for, for people."""
        tensors = tuple(without_streams(manifest) for manifest in self.manifests)
        copies = tuple(PeerCopy(copy.owner, copy.keeper, without_streams(copy.parts)) for copy in self.copies)
        loss = survival(with_copies(tensors, copies), self.nodes)
        one_node = "" if len(set(self.nodes)) > 1 else " (all workers are on one node, and so are the copies)"
        return f"the loss of {loss} costs no state{one_node}"


def without_streams(manifest: Manifest) -> Manifest:
    """A new worker can start a new random stream, so a lost one does not count as lost state."""
    return tuple(shard for shard in manifest if not shard.tensor.name.startswith(STREAM_PREFIX))


def make_plan(group: dist.ProcessGroup, manifest: Manifest, node: int, newest: int) -> CopyPlan:
    """Agree on who keeps what. Collective over the group. `newest`: of this rank's own complete copy sets.

    Raises:
        RuntimeError: a rank was lost.
    """
    rows = gather_json(group, {"manifest": encode_manifest(manifest), "node": node, "newest": newest})
    manifests = tuple(decode_manifest(row["manifest"]) for row in rows)
    nodes = tuple(row["node"] for row in rows)
    return CopyPlan(manifests, nodes, peer_copies(manifests, nodes), min(row["newest"] for row in rows))


def exchange(group: dist.ProcessGroup, keeper: int | None, copies: CopySet, *, is_taken: bool) -> bool:
    """Send this rank's part of a copy set to its keeper, and receive what it keeps; returns whether its share of the
    set is complete. `is_taken`: False where this rank could not copy its state, and so sends nothing but that.

    Raises:
        RuntimeError: a rank was lost.
    """
    works: list[Any] = []
    if keeper is not None and is_taken:
        values = torch.frombuffer(bytearray(copies.own_values.encode()), dtype=torch.uint8)
        works = [
            group.send([_header(copies.number, len(values))], keeper, _Tag.HEADER),
            group.send([copies.sent], keeper, _Tag.PARTS),
            group.send([values], keeper, _Tag.VALUES),
        ]
    elif keeper is not None:
        works = [group.send([_header(copies.number, _NOT_TAKEN)], keeper, _Tag.HEADER)]
    is_complete = is_taken
    for owner, buffer in copies.kept.items():
        header = _header(0, 0)
        group.recv([header], owner, _Tag.HEADER).wait()
        number, length = header.tolist()
        assert number == copies.number, "every rank takes the same copy set"
        if length == _NOT_TAKEN:
            is_complete = False
            continue
        values = torch.zeros(length, dtype=torch.uint8, device="cpu")
        for tensor, tag in ((buffer, _Tag.PARTS), (values, _Tag.VALUES)):
            group.recv([tensor], owner, tag).wait()
        copies.kept_values[owner] = values.numpy().tobytes().decode()
    for work in works:
        work.wait()
    return is_complete


def _header(number: int, length: int) -> torch.Tensor:
    """`number`: of the copy set. `length`: bytes of the values that follow, or `_NOT_TAKEN`."""
    return torch.tensor([number, length], dtype=torch.int64, device="cpu")
