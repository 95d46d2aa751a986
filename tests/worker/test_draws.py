"""Random numbers by sample."""

from __future__ import annotations

import pytest
import torch

from etc_agent.worker.data.draws import Draws


def drawn(draws: Draws, ids: range, size: tuple[int, ...], times: int) -> list[int]:
    draws.begin_step()
    return [number for _ in range(times) for number in draws.take(ids, 1 << 40, size).flatten().tolist()]


def test_each_sample_has_its_number_at_every_size_of_the_job() -> None:
    whole = drawn(Draws(3), range(24, 48), (2, 3), 4)
    assert len(set(whole)) == 24
    parts = [drawn(Draws(3), range(first, first + 8), (4,), 2) for first in (24, 32, 40)]
    assert [number for part in parts for number in part] == whole
    assert drawn(Draws(4), range(24, 48), (24,), 1) != whole


def test_numbers_are_spread_below_high() -> None:
    numbers = Draws(0).take(range(2000), 10, (2000,))
    assert numbers.dtype == torch.int64
    assert all(120 < count < 280 for count in numbers.bincount(minlength=10).tolist())


def test_a_step_that_draws_more_or_fewer_than_it_has_samples_is_refused() -> None:
    draws, ids = Draws(0), range(6)
    draws.check(ids)
    draws.take(ids, 10, (4,))
    with pytest.raises(ValueError, match=r"this rank has 6 samples in a step, and 4 were drawn"):
        draws.check(ids)
    with pytest.raises(ValueError, match=r"this rank has 6 samples in a step, and 8 are drawn"):
        draws.take(ids, 10, (4,))
    draws.take(ids, 10, (2,))
    draws.check(ids)
    draws.begin_step()
    draws.check(ids)
