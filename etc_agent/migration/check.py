"""Checks that the tensors which a worker brings match the plan, before anything is moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from etc_agent.migration.errors import MigrationError
from etc_agent.migration.memory.bits import dtype_name
from etc_agent.migration.memory.spans import is_backed
from etc_agent.planner.transfers.plan import MigrationPlan
from etc_agent.state.boxes import Box
from etc_agent.state.layout import LogicalTensor, Shard


def needed_shards(plan: MigrationPlan, worker: int) -> tuple[list[Shard], list[Shard]]:
    """The old and the new shards of `worker` that the plan reads and writes, each listed once."""
    old: dict[Shard, None] = {}
    new: dict[Shard, None] = {}
    for refer in plan.refers:
        if refer.worker == worker:
            old[Shard(refer.tensor, refer.source_box)] = None
            new[Shard(refer.tensor, refer.target_box)] = None
    for transfers in plan.rounds:
        for transfer in transfers:
            if transfer.source == worker:
                (new if transfer.forwarded else old)[Shard(transfer.tensor, transfer.source_box)] = None
            if transfer.target == worker:
                new[Shard(transfer.tensor, transfer.target_box)] = None
    return list(old), list(new)


def check_tensors(
    worker: int, role: str, needed: Iterable[Shard], given: Mapping[Shard, torch.Tensor]
) -> None:
    """Check that every needed shard is there and that every given tensor is what its shard says.

    Args:
        role: ``old`` or ``new``, for the message.

    Raises:
        MigrationError: naming worker, tensor and box.
    """
    for shard in needed:
        if shard not in given:
            raise MigrationError(
                f"worker {worker}: the plan names an {role} shard of {describe(shard.tensor, shard.box)} "
                f"that this worker did not bring; its manifest and its tensors must come from the same state"
            )
    for shard, tensor in given.items():
        where = f"worker {worker}: {role} shard of {describe(shard.tensor, shard.box)}"
        if tuple(tensor.shape) != shard.box.shape:
            raise MigrationError(
                f"{where}: expected shape {shard.box.shape} from the manifest, got {tuple(tensor.shape)}"
            )
        if dtype_name(tensor.dtype) != shard.tensor.dtype or tensor.element_size() != shard.tensor.itemsize:
            raise MigrationError(
                f"{where}: expected {shard.tensor.dtype} of {shard.tensor.itemsize} bytes from the manifest, "
                f"got {dtype_name(tensor.dtype)} of {tensor.element_size()} bytes"
            )
        if tensor.is_conj() or tensor.is_neg():
            raise MigrationError(
                f"{where}: expected plain bits, got a view that is conjugated or negated when it is read; "
                f"bring tensor.resolve_conj().resolve_neg()"
            )
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise MigrationError(
                f"{where}: expected a dense tensor with storage, got one on device {tensor.device} "
                f"with layout {tensor.layout}"
            )
        check_backed(worker, role, shard, tensor)


def check_backed(worker: int, role: str, shard: Shard, tensor: torch.Tensor) -> None:
    """Check that the storage of a tensor has not been emptied or cut (`UntypedStorage.resize_`).

    Raises:
        MigrationError: naming worker, tensor and box.
    """
    if not is_backed(tensor):
        raise MigrationError(
            f"worker {worker}: {role} shard of {describe(shard.tensor, shard.box)}: expected a storage with all of its "
            f"bytes, got one of {tensor.untyped_storage().nbytes()} bytes; give it its memory back before a step ends"
        )


def check_dtypes(worker: int, shards: Iterable[Shard]) -> None:
    """Check that tensors of these shards can be made.

    Raises:
        MigrationError: naming worker, tensor and box.
    """
    for shard in shards:
        dtype = getattr(torch, shard.tensor.dtype, None)
        if not isinstance(dtype, torch.dtype) or dtype.itemsize != shard.tensor.itemsize:
            raise MigrationError(
                f"worker {worker}: new shard of {describe(shard.tensor, shard.box)}: "
                f"{shard.tensor.dtype!r} is no dtype of torch with {shard.tensor.itemsize} bytes"
            )


def describe(tensor: LogicalTensor, box: Box) -> str:
    """``'w' [4:8, 0:16]``: a tensor and the part of it, for people."""
    ranges = ", ".join(f"{start}:{start + size}" for start, size in zip(box.offset, box.shape, strict=True))
    return f"{tensor.name!r} [{ranges}]"
