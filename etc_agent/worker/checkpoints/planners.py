"""DCP planners for shards: the boxes that a rank writes or needs, of tensors that have the same names on all ranks.

What is written is an ordinary DCP checkpoint: `torch.distributed.checkpoint.load` reads it into plain tensors,
DTensors or anything else, and `dcp_to_torch_save` turns it into one file.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    TensorWriteData,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from etc_agent.errors import EtcError
from etc_agent.state.boxes import Box
from etc_agent.state.layout import LogicalTensor, Manifest, Shard
from etc_agent.worker.checkpoints.names import path_of_name
from etc_agent.worker.checkpoints.sharing import shared
from etc_agent.worker.checkpoints.snapshot import Snapshot


class BoxSavePlanner(SavePlanner):
    """Writes a snapshot's shards, replicas once, and its texts. `written`: the shards that fell to this rank."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._held = {shard.tensor.name: (shard.box, tensor) for shard, tensor in snapshot.tensors.items()}
        self.written: Manifest = ()

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the snapshot is known."""

    def create_local_plan(self) -> SavePlan:
        """What this rank could write.

        Raises:
            EtcError: this rank's state could not be copied; then no rank writes anything.
        """
        if self._snapshot.error:
            raise EtcError(self._snapshot.error)
        texts = [
            WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(len(text)))
            for name, text in self._snapshot.texts.items()
        ]
        return SavePlan([*(_item(shard) for shard in self._snapshot.tensors), *texts])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        offers = [tuple(_shard(item) for item in plan.items if item.tensor_data is not None) for plan in all_plans]
        plans = [
            replace(plan, items=[*map(_item, shards), *(item for item in plan.items if item.tensor_data is None)])
            for plan, shards in zip(all_plans, shared(offers), strict=True)
        ]
        plans, metadata = create_default_global_save_plan(plans)
        return plans, replace(
            metadata, planner_data={name: path_of_name(name) for name in metadata.state_dict_metadata}
        )

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.written = tuple(_shard(item) for item in new_plan.items if item.tensor_data is not None)
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = write_item.index.fqn
        if write_item.type is WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(self._snapshot.texts[name], stream)
            return stream
        held, tensor = self._held[name]
        return tensor[_shard(write_item).box.within(held)]


class BoxLoadPlanner(LoadPlanner):
    """Reads shards into tensors, and texts. `texts`: name -> what was read, once it has been."""

    def __init__(self, tensors: Mapping[Shard, torch.Tensor], names: tuple[str, ...] = ()) -> None:
        self._tensors = {shard.tensor.name: tensor for shard, tensor in tensors.items()}
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
                items += create_read_items_for_chunk_list(shard.tensor.name, entry, [_chunk(shard.box)])
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
        tensor = self._tensors[read_item.dest_index.fqn]
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


def _item(shard: Shard) -> WriteItem:
    properties = TensorProperties(dtype=getattr(torch, shard.tensor.dtype))
    data = TensorWriteData(_chunk(shard.box), properties, torch.Size(shard.tensor.shape))
    return WriteItem(MetadataIndex(shard.tensor.name, shard.box.offset), WriteItemType.SHARD, tensor_data=data)


def _shard(item: WriteItem) -> Shard:
    data = item.tensor_data
    assert data is not None
    dtype = data.properties.dtype
    tensor = LogicalTensor(
        item.index.fqn, tuple(data.size), str(dtype).removeprefix("torch."), dtype.itemsize
    )
    return Shard(tensor, Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)))


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
