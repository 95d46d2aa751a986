"""What `build` may say of devices."""

from __future__ import annotations

import torch
from torch import nn

from etc_agent.adapters.staying_on_meta import StayingOnMeta


def test_a_model_that_is_moved_in_build_stays_on_meta_and_takes_the_dtype() -> None:
    with torch.device("meta"), StayingOnMeta():
        models = [
            nn.Linear(2, 2).to("cpu"), nn.Linear(2, 2).to(torch.device("cuda", 0)), nn.Linear(2, 2).to(device="cuda"),
            nn.Linear(2, 2).cuda(), nn.Linear(2, 2).cpu(), nn.Linear(2, 2).to("cpu", torch.bfloat16),
        ]
        moved = torch.zeros(3, device="cpu").to("cpu")
    assert all(model.weight.is_meta and isinstance(model.weight, nn.Parameter) for model in models)
    assert [model.weight.dtype for model in models] == [torch.float32] * 5 + [torch.bfloat16]
    assert not moved.is_meta
