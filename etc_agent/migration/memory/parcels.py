"""Parcels: how tensors share one range of memory. Large tensors have pages of their own, small ones share some
pages."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from etc_agent.migration.memory.pages import Mapped
from etc_agent.state.layout import Shard

_ALIGN_BYTES = 64
_SMALL_BYTES = 32 << 10
_PARCEL_BYTES = 128 << 10
"""Tensors below `_SMALL_BYTES` share parcels of this size, whose pages are freed with the last tensor in them."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Whole pages for one large tensor or several small ones; offsets and sizes in bytes from the start of the
    range."""

    start: int
    end: int
    starts: Mapping[Shard, int]


def lay_out(shards: Iterable[Shard], shifts: Mapping[Shard, int] | None = None) -> tuple[list[Parcel], int]:
    """Parcels for the non-empty shards, in their order, and the total size in bytes.

    `shifts`: large shard -> how many bytes after the start of its first page it begins.
    """
    parcels: list[Parcel] = []
    for group in _grouped(shard for shard in shards if shard.num_bytes):
        start = end = parcels[-1].end if parcels else 0
        starts = {}
        for shard in group:
            end += shifts.get(shard, 0) if shifts else 0
            starts[shard] = end
            end += _rounded(shard.num_bytes, _ALIGN_BYTES)
        parcels.append(Parcel(start, _rounded(end, mmap.PAGESIZE), starts))
    return parcels, parcels[-1].end if parcels else 0


def tensors_of(memory: Mapped, parcels: Iterable[Parcel]) -> dict[Shard, torch.Tensor]:
    """The tensors of `parcels`; the pages of a parcel are freed with its last tensor."""
    tensors = {}
    for parcel in parcels:
        part = memory.part(parcel.start, parcel.end - parcel.start, gives_back=True)
        for shard, start in parcel.starts.items():
            tensors[shard] = tensor_at(part, start - parcel.start, shard)
    return tensors


def tensor_at(part: ctypes.Array[ctypes.c_char], start: int, shard: Shard) -> torch.Tensor:
    """The tensor of `shard` that begins at byte `start` of `part`, over a storage of exactly its bytes."""
    flat = torch.frombuffer(part, dtype=torch.uint8, offset=start, count=shard.num_bytes)
    return flat.view(getattr(torch, shard.tensor.dtype)).view(shard.box.shape)


def _grouped(shards: Iterable[Shard]) -> Iterator[list[Shard]]:
    small: list[Shard] = []
    small_bytes = 0
    for shard in shards:
        if shard.num_bytes >= _SMALL_BYTES:
            yield [shard]
            continue
        small.append(shard)
        small_bytes += shard.num_bytes
        if small_bytes >= _PARCEL_BYTES:
            yield small
            small, small_bytes = [], 0
    if small:
        yield small


def _rounded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit
