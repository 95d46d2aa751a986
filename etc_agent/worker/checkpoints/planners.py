"""DCP planners for shards: the boxes that a rank writes or needs, of tensors that have the same names on all ranks.

What is written is an ordinary DCP checkpoint: `torch.distributed.checkpoint.load` reads it into plain tensors,
DTensors or anything else, and `dcp_to_torch_save` turns it into one file.
"""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import (
    Metadata,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    TensorWriteData,
    WriteItemType,
)

from etc_agent.errors import EtcError
from etc_agent.integrations.dcp_boxes import chunk_of
from etc_agent.state.boxes import Box
from etc_agent.state.layout import LogicalTensor, Manifest, Shard, by_tensor, shard_around
from etc_agent.worker.checkpoints.names import path_of_name
from etc_agent.worker.checkpoints.sharing import shared
from etc_agent.worker.checkpoints.snapshot import Snapshot


class BoxSavePlanner(SavePlanner):
    """Writes a snapshot's shards, replicas once, and its texts. `written`: the shards that fell to this rank."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._held = by_tensor(snapshot.tensors)
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
        part = _shard(write_item)
        held = shard_around(self._held, part)
        return self._snapshot.tensors[held][part.box.within(held.box)]


def _item(shard: Shard) -> WriteItem:
    properties = TensorProperties(dtype=getattr(torch, shard.tensor.dtype))
    data = TensorWriteData(chunk_of(shard.box), properties, torch.Size(shard.tensor.shape))
    return WriteItem(MetadataIndex(shard.tensor.name, shard.box.offset), WriteItemType.SHARD, tensor_data=data)


def _shard(item: WriteItem) -> Shard:
    data = item.tensor_data
    assert data is not None
    dtype = data.properties.dtype
    tensor = LogicalTensor(
        item.index.fqn, tuple(data.size), str(dtype).removeprefix("torch."), dtype.itemsize
    )
    return Shard(tensor, Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
