"""The default dtype that a library sets in `build` is that of `build`'s thread alone."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn

from etc_agent.adapters.own_dtype import own_default_dtype


def test_what_build_sets_counts_for_the_tensors_that_it_makes() -> None:
    with torch.device("meta"), own_default_dtype():
        torch.set_default_dtype(torch.bfloat16)
        layer = nn.Linear(4, 4)
        norm = nn.LayerNorm(4)
        assert torch.get_default_dtype() == torch.bfloat16
        made = [torch.zeros(2), torch.full((2,), 1.5), torch.arange(0.0, 2.0), torch.tensor(1.0)]
        named = [torch.zeros(2, dtype=torch.float32), torch.arange(4), torch.tensor(np.ones(2, np.float32))]
    assert {*(param.dtype for param in (*layer.parameters(), *norm.parameters())), *(each.dtype for each in made)} == {
        torch.bfloat16
    }
    assert [each.dtype for each in named] == [torch.float32, torch.int64, torch.float32]
    assert all(param.is_meta and param.is_leaf for param in layer.parameters())
    assert torch.get_default_dtype() == torch.float32
    assert nn.Linear(4, 4).weight.dtype == torch.float32


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_step_beside_it_makes_tensors_of_its_own_default(*, is_restored: bool) -> None:
    has_set, has_looked = threading.Event(), threading.Event()

    def build() -> None:
        with torch.device("meta"), own_default_dtype():
            torch.set_default_dtype(torch.float64)
            has_set.set()
            has_looked.wait(30)
            if is_restored:
                torch.set_default_dtype(torch.float32)

    building = threading.Thread(target=build)
    building.start()
    assert has_set.wait(30)
    seen = torch.get_default_dtype(), torch.zeros(1).dtype
    has_looked.set()
    building.join()
    assert seen == (torch.float32, torch.float32)
    assert torch.zeros(1).dtype == torch.float32
