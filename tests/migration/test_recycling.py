"""Pages of old tensors under new ones: the kernel's part of `release` mode."""

from __future__ import annotations

from pathlib import Path

import torch

from etc_agent.migration.memory.pages import Mapped
from etc_agent.migration.memory.recycling import PagePool

_MB = 1 << 20


def resident_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def reserved(size: int) -> torch.Tensor:
    return torch.frombuffer(Mapped(size).part(0, size, gives_back=True), dtype=torch.uint8)


def fill(spare: PagePool, tensor: torch.Tensor) -> None:
    spare.fill(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def test_pages_move_from_an_old_tensor_to_a_new_one_without_more_memory() -> None:
    old, new, spare = torch.full((64 * _MB,), 7, dtype=torch.uint8), reserved(60 * _MB), PagePool()
    before = resident_mb()
    assert spare.offer(old, 64 * _MB) == 64 * _MB
    assert 63 * _MB < spare.num_bytes <= 64 * _MB
    fill(spare, new)
    assert bool((new == 7).all())  # the very pages
    assert spare.num_bytes < 5 * _MB
    assert resident_mb() - before < 16  # not 60 more
    spare.shrink(0)
    assert spare.num_bytes == 0
    assert old.untyped_storage().nbytes() == 0
    new.fill_(1)


def test_more_than_is_wanted_goes_back_at_once() -> None:
    old, spare = torch.ones(32 * _MB, dtype=torch.uint8), PagePool()
    before = resident_mb()
    spare.offer(old, 16 * _MB)
    assert spare.num_bytes == 0
    assert before - resident_mb() > 31


def test_a_tensor_put_together_from_several_is_taken_apart_again() -> None:
    spare, first = PagePool(), reserved(12 * _MB)
    olds = [torch.full((4 * _MB,), value, dtype=torch.uint8) for value in (1, 2, 3)]
    for old in olds:
        spare.offer(old, 12 * _MB)
    fill(spare, first)
    first.fill_(9)
    parts = [reserved(5 * _MB), reserved(5 * _MB)]
    before = resident_mb()
    spare.offer(first, 12 * _MB)
    for part in parts:
        fill(spare, part)
        part.fill_(4)
    spare.shrink(0)
    assert resident_mb() - before < 4
    assert all(bool((part == 4).all()) for part in parts)


def test_memory_that_another_process_may_share_is_given_back_and_not_moved() -> None:
    old, new, spare = torch.ones(8 * _MB, dtype=torch.uint8).share_memory_(), reserved(8 * _MB), PagePool()
    spare.offer(old, 8 * _MB)
    assert spare.num_bytes == 0
    fill(spare, new)
    assert not new.any()


def test_small_tensors_are_left_to_the_allocator() -> None:
    spare = PagePool()
    old = torch.ones(1000)
    spare.offer(old, _MB)
    assert spare.num_bytes == 0
    assert old.untyped_storage().nbytes() == 0
