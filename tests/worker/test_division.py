"""Dividing the samples of a step over dp ranks and microbatches."""

from __future__ import annotations

import pytest

from etc_agent.errors import ConfigRefusedError
from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.data.division import GlobalBatch, parts


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 7, 8, 11, 12])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 12])
def test_every_sample_counts_once_and_all_ranks_get_as_many_microbatches(num_ranks: int, size: int) -> None:
    batch = GlobalBatch(12, "weighted")
    for step in (0, 7):
        of_ranks = [list(parts(batch, step, rank, num_ranks, size)) for rank in range(num_ranks)]
        assert len({len(of_rank) for of_rank in of_ranks}) == 1
        counted = [i for of_rank in of_ranks for part in of_rank for i in part.ids[: part.weight]]
        assert counted == list(range(step * 12, step * 12 + 12))
        for of_rank in of_ranks:
            assert [part.is_last for part in of_rank] == [False] * (len(of_rank) - 1) + [True]
            assert all(part.weight in (0, len(part.ids)) and part.ids for part in of_rank)


@pytest.mark.parametrize(("reduction", "averaged"), [("mean", True), ("sum", False)])
def test_with_the_factors_the_gradient_is_the_mean_over_the_global_batch(reduction: str, averaged: bool) -> None:
    gradients = {i: float(i * i + 1) for i in range(12)}
    for num_ranks in (1, 2, 5, 7, 12):
        total = 0.0
        for rank in range(num_ranks):
            for part in parts(GlobalBatch(12, "weighted"), 0, rank, num_ranks, 2):
                mean = sum(gradients[i] for i in part.ids) / len(part.ids)
                total += mean * part.factor(12, num_ranks, reduction)  # type: ignore[arg-type]
        assert total / (num_ranks if averaged else 1) == pytest.approx(sum(gradients.values()) / 12)


def test_equal_division_needs_a_dp_that_divides_and_weighted_takes_any_up_to_the_batch() -> None:
    GlobalBatch(12).check(ParallelConfig(dp=6))
    with pytest.raises(ConfigRefusedError, match=r"dp=7; choose dp from 1, 2, 3, 4, 6, 12, or .*division='weighted'"):
        GlobalBatch(12).check(ParallelConfig(dp=7))
    GlobalBatch(12, "weighted").check(ParallelConfig(dp=7))
    with pytest.raises(ConfigRefusedError, match=r"has no sample for some of dp=13"):
        GlobalBatch(12, "weighted").check(ParallelConfig(dp=13))
