"""Reading boxes of tensors from a checkpoint of torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from etc_agent.state.boxes import Box
from etc_agent.state.layout import LogicalTensor, Shard


class BoxLoadPlanner(LoadPlanner):
    """Reads shards into tensors, and texts. `texts`: name -> what was read, once it has been."""

    def __init__(self, tensors: Mapping[Shard, torch.Tensor], names: tuple[str, ...] = ()) -> None:
        self._tensors = {(shard.tensor.name, shard.box.offset): tensor for shard, tensor in tensors.items()}
        self._shards = tuple(tensors)
        self._names = names
        self._metadata: Metadata | None = None
        self.texts: dict[str, str] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        known = self._metadata.state_dict_metadata
        items = []
        for shard in self._shards:
            if shard.box.num_elements:
                entry = known[shard.tensor.name]
                assert isinstance(entry, TensorStorageMetadata)
                items += create_read_items_for_chunk_list(shard.tensor.name, entry, [chunk_of(shard.box)])
        for name in self._names:
            assert isinstance(known[name], BytesStorageMetadata)
            index, nothing = MetadataIndex(name), torch.Size(())
            items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.texts[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert read_item.dest_index.offset is not None
        tensor = self._tensors[read_item.dest_index.fqn, tuple(read_item.dest_index.offset)]
        ranges = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return tensor[tuple(slice(start, start + length) for start, length in ranges)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: what `resolve_tensor` returned shares the memory of the state."""


def logical_tensors(metadata: Metadata) -> dict[str, LogicalTensor]:
    """The tensors of a checkpoint, by name."""
    found = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype = entry.properties.dtype
            found[name] = LogicalTensor(name, tuple(entry.size), str(dtype).removeprefix("torch."), dtype.itemsize)
    return found


def chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
