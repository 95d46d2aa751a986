"""Where copies lie in host memory: one flat buffer for a worker's own state, one for each owner that it keeps.

A worker's own copy begins with the parts that its keeper gets, so that they are sent from there as one message. A shard
of which only a part goes to the keeper follows as a whole, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from etc_agent.migration.memory.bits import bits_at, touch
from etc_agent.state.layout import Manifest, Shard

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
    """Parts one after the other; `num_bytes` of them all."""

    places: tuple[Place, ...]
    num_bytes: int

    @classmethod
    def of(cls, parts: Manifest, start_bytes: int = 0) -> Self:
        """The parts in the order given, from `start_bytes` on, which counts to `num_bytes`."""
        places, end = [], start_bytes
        for part in parts:
            places.append(Place(part, end))
            end += -(-part.num_bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(places), end)


@dataclass(frozen=True, slots=True)
class OwnLayout:
    """A worker's own copy. `manifest`: all that it holds. `sent`: the parts that its keeper gets; `rest`: the shards
    that are not wholly among them."""

    manifest: Manifest
    sent: Places
    rest: Places

    @classmethod
    def of(cls, manifest: Manifest, sent: Manifest) -> Self:
        whole = set(sent)
        first = Places.of(sent)
        return cls(manifest, first, Places.of(tuple(s for s in manifest if s not in whole), first.num_bytes))

    @property
    def num_bytes(self) -> int:
        return self.rest.num_bytes

    def shards(self) -> dict[Shard, Place]:
        """Every shard of the manifest -> its place."""
        places = {place.part: place for place in (*self.sent.places, *self.rest.places)}
        return {shard: places[shard] for shard in self.manifest}


def host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """A flat uint8 buffer in host memory with all its pages, pinned where the state is on a GPU."""
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    touch(buffer)
    return buffer
