"""States, layouts and plans for the tests: written for being obviously right, not for speed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import product

import torch

from etc_agent.planner.transfers.plan import MigrationPlan, Refer, Transfer
from etc_agent.state.boxes import Box
from etc_agent.state.layout import LogicalTensor, Manifest, Shard


def logical(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> LogicalTensor:
    return LogicalTensor(name, shape, str(dtype).removeprefix("torch."), dtype.itemsize)


def full_value(tensor: LogicalTensor) -> torch.Tensor:
    """Random bits of the whole logical tensor, the same in every process."""
    seed = int.from_bytes(hashlib.sha256(tensor.name.encode()).digest()[:4], "big")
    dtype = getattr(torch, tensor.dtype)
    bits = torch.randint(0, 256, (*tensor.shape, tensor.itemsize), generator=torch.Generator().manual_seed(seed))
    if dtype is torch.bool:
        bits %= 2
    return bits.to(torch.uint8).view(dtype).reshape(tensor.shape)


def slice_of(shard: Shard) -> torch.Tensor:
    """The oracle: slice the whole tensor."""
    box = shard.box
    return full_value(shard.tensor)[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))].clone()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


def grid(tensor: LogicalTensor, parts: Sequence[int]) -> list[Shard]:
    """The tensor cut into ``parts[dim]`` nearly even parts along each dim, row-major."""
    cuts = []
    for size, count in zip(tensor.shape, parts, strict=True):
        step = -(-size // count)
        cuts.append([(min(i * step, size), max(0, min(size, (i + 1) * step) - i * step)) for i in range(count)])
    return [Shard(tensor, Box(tuple(o for o, _ in cell), tuple(n for _, n in cell))) for cell in product(*cuts)]


def naive_plan(previous: Sequence[Manifest], current: Sequence[Manifest], per_round: int = 1 << 30) -> MigrationPlan:
    """Each needed box from the worker itself, else from the lowest worker that holds some of it. Shards of one tensor
    on different workers are equal or disjoint in these tests. Transfers are dealt into rounds of `per_round`."""
    refers: list[Refer] = []
    transfers: list[Transfer] = []
    for target, manifest in enumerate(current):
        for need in manifest:
            seen: set[Box] = set()
            for source in sorted(range(len(previous)), key=lambda w: (w != target, w)):
                for have in previous[source]:
                    if have.tensor != need.tensor or (common := need.box.intersect(have.box)) is None or common in seen:
                        continue
                    seen.add(common)
                    if source == target:
                        refers.append(Refer(target, need.tensor, common, have.box, need.box))
                    else:
                        transfers.append(Transfer(source, target, need.tensor, common, have.box, need.box))
            assert sum(box.num_elements for box in seen) == need.box.num_elements, need
    rounds = tuple(tuple(transfers[i : i + per_round]) for i in range(0, len(transfers), per_round))
    digest = hashlib.sha256(repr((previous, current, per_round)).encode()).hexdigest()
    return MigrationPlan(len(previous), tuple(refers), rounds, digest)


def zeros(shard: Shard) -> torch.Tensor:
    """A new tensor of a shard."""
    return torch.zeros(shard.box.shape, dtype=getattr(torch, shard.tensor.dtype))
