"""Where copies lie in host memory: one flat buffer for a worker's own state, one for each block that it keeps.

A worker's own copy begins with the pieces that its keepers get, so that each is sent from there without another copy. A
shard that is not wholly in them follows as a whole, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Self

import torch

from etc_agent.migration.memory.bits import bits_at, touch
from etc_agent.planner.copies.keepers import Block
from etc_agent.state.layout import Manifest, Shard, by_tensor, shard_around

_ALIGNMENT = 16
"""Bytes. Every dtype can be read at a multiple of it."""


@dataclass(frozen=True, slots=True)
class Place:
    """`part`, a box of a tensor, lies `start_bytes` from the beginning of its buffer."""

    part: Shard
    start_bytes: int

    def bits(self, buffer: torch.Tensor) -> torch.Tensor:
        """The part as integers of its item size, a view of the flat uint8 `buffer`."""
        return bits_at(buffer, self.start_bytes, self.part.box.shape, self.part.tensor.itemsize)

    def tensor(self, buffer: torch.Tensor) -> torch.Tensor:
        """The part as its own dtype, a view of the flat uint8 `buffer`."""
        return self.bits(buffer).view(getattr(torch, self.part.tensor.dtype))


@dataclass(frozen=True, slots=True)
class Places:
    """Parts one after the other, from `start_bytes` to `end_bytes` of a buffer."""

    places: tuple[Place, ...]
    start_bytes: int
    end_bytes: int

    @classmethod
    def of(cls, parts: Manifest, start_bytes: int = 0) -> Self:
        """The parts in the order given."""
        places, end = [], start_bytes
        for part in parts:
            places.append(Place(part, end))
            end += -(-part.num_bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(places), start_bytes, end)

    @property
    def num_bytes(self) -> int:
        """A multiple of 16."""
        return self.end_bytes - self.start_bytes

    def range_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The bytes of all parts, a view of the flat uint8 `buffer`."""
        return buffer[self.start_bytes : self.end_bytes]


@dataclass(frozen=True, slots=True)
class OwnLayout:
    """A worker's own copy. `manifest`: all that it holds. `sent`: number of a block -> the
    piece that its keeper gets; `rest`: the shards that are not wholly in the pieces."""

    manifest: Manifest
    sent: Mapping[int, Places]
    rest: Places

    @classmethod
    def of(cls, manifest: Manifest, pieces: Mapping[int, Manifest]) -> Self:
        """`pieces`: number of a block -> the parts that its keeper gets."""
        sent: dict[int, Places] = {}
        end = 0
        for number, parts in pieces.items():
            sent[number] = Places.of(parts, end)
            end = sent[number].end_bytes
        num_sent, shards = Counter[Shard](), by_tensor(manifest)
        for part in chain(*pieces.values()):
            num_sent[shard_around(shards, part)] += part.box.num_elements
        rest = tuple(shard for shard in manifest if num_sent[shard] < shard.box.num_elements)
        return cls(manifest, sent, Places.of(rest, end))

    @property
    def num_bytes(self) -> int:
        return self.rest.end_bytes

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(chain(*(places.places for places in self.sent.values()), self.rest.places))

    def shards(self) -> dict[Shard, tuple[Place, ...]]:
        """Every shard of the manifest -> where it lies: one place, or those of the parts that make it up."""
        found: dict[Shard, list[Place]] = {shard: [] for shard in self.manifest}
        shards = by_tensor(self.manifest)
        for places in self.sent.values():
            for place in places.places:
                found[shard_around(shards, place.part)].append(place)
        found |= {place.part: [place] for place in self.rest.places}
        return {shard: tuple(places) for shard, places in found.items()}


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A block that a worker keeps. `pieces`: owner -> where its parts lie in the block's buffer."""

    pieces: Mapping[int, Places]

    @classmethod
    def of(cls, block: Block) -> Self:
        return cls({piece.owner: Places.of(piece.parts) for piece in block.pieces})

    @property
    def num_bytes(self) -> int:
        return max(places.num_bytes for places in self.pieces.values())


def host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """A flat uint8 buffer in host memory with all its pages, pinned where the state is on a GPU."""
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    touch(buffer)
    return buffer
