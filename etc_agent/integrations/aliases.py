"""Aliases: tensors of a state that are views of another tensor of it. Their bytes are carried once, and they stay
views."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from etc_agent.errors import EtcError
from etc_agent.torch_private.dtensors import local_part
from etc_agent.torch_private.tensors import storage_key


@dataclass(frozen=True, slots=True)
class Alias:
    """A tensor whose bytes all lie inside those of `owner`, `start_bytes` from its first one."""

    tensor: torch.Tensor
    owner: torch.Tensor
    start_bytes: int


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind `tensor`, sharing its storage and outside autograd."""
    return (local_part(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def aliases_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Alias]:
    """The named tensors that are views of another one; if several are the same bytes, all but the first.

    Raises:
        EtcError: two of them overlap, and neither is a contiguous tensor that holds the other.
    """
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, tensor in tensors.items():
        local = local_tensor(tensor)
        if local.numel():
            by_storage[storage_key(local)].append((name, tensor))
    found = {}
    for members in by_storage.values():
        if len(members) == 1:  # nearly always, and this runs while training stands still
            continue
        owners: list[tuple[str, torch.Tensor]] = []
        for name, tensor in sorted(members, key=lambda member: -_num_bytes(member[1])):
            start, end = _span(tensor)
            around = next((other for _, other in owners if _holds(other, start, end)), None)
            if around is not None:
                found[name] = Alias(tensor, around, start - _span(around)[0])
                continue
            for other_name, other in owners:
                first, last = _span(other)
                if start < last and first < end:
                    raise EtcError(
                        f"{other_name} and {name} overlap in one storage, and neither is a contiguous tensor that "
                        "holds the other; make one a view of the other, or give each memory of its own"
                    )
            owners.append((name, tensor))
    return found


def view_of_owner(alias: Alias, owner: torch.Tensor) -> torch.Tensor:
    """A view of the plain tensor `owner` that has the same position and shape as `alias` had in its own owner."""
    like = local_tensor(alias.tensor)
    start = owner.storage_offset() * owner.element_size() + alias.start_bytes
    empty = torch.empty(0, dtype=like.dtype, device=owner.device)
    return empty.set_(owner.untyped_storage(), start // like.element_size(), like.shape, like.stride())


def _holds(owner: torch.Tensor, start: int, end: int) -> bool:
    first, last = _span(owner)
    return local_tensor(owner).is_contiguous() and first <= start and end <= last


def _num_bytes(tensor: torch.Tensor) -> int:
    start, end = _span(tensor)
    return end - start


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte and the byte after the last, as positions in its storage."""
    local = local_tensor(tensor)
    first = int(local.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True)) + 1
    return first * local.element_size(), last * local.element_size()
