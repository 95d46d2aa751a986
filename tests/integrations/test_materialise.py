"""From meta to real tensors, in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from etc_agent.errors import EtcError
from etc_agent.integrations.native import TrainState, create_optimizer_state, materialise, shards_of
from etc_agent.state.layout import Shard


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.empty(3), requires_grad=False)
        self.register_buffer("kept", torch.empty(2))
        self.register_buffer("inverse_frequency", torch.empty(2), persistent=False)
        self.register_buffer("count", torch.empty((), dtype=torch.int64))


def on_meta() -> TrainState:
    with torch.device("meta"):
        model = Tied()
        state = TrainState(model, torch.optim.AdamW(model.parameters()))
    create_optimizer_state(state)
    return state


def fresh(shard: Shard, meta: torch.Tensor) -> torch.Tensor:
    return torch.zeros(meta.shape, dtype=meta.dtype)


def test_everything_is_real_afterwards_and_tying_buffers_and_requires_grad_are_kept() -> None:
    state = on_meta()
    model = state.model
    before = {name: id(param) for name, param in model.named_parameters()}
    materialise(state, fresh)
    assert all(local.device.type == "cpu" for local in shards_of(state).values())
    assert model.head.weight is model.embedding.weight
    assert {name: id(param) for name, param in model.named_parameters()} == before
    assert all(isinstance(param, nn.Parameter) for param in model.parameters())
    assert not model.frozen.requires_grad
    assert model.embedding.weight.requires_grad
    assert "inverse_frequency" not in model.state_dict()
    assert model.count.dtype == torch.int64


def test_the_optimizer_updates_the_materialised_parameters() -> None:
    state = on_meta()
    materialise(state, fresh)
    state.model.head(state.model.embedding(torch.tensor([1])) + 1.0).sum().backward()
    state.optimizer.step()
    assert state.model.embedding.weight.abs().sum() > 0
    assert state.optimizer.state[state.model.head.weight]["step"] == 1


def test_storage_can_be_shared_with_a_live_state() -> None:
    old, new = on_meta(), on_meta()
    materialise(old, fresh)
    live = shards_of(old)
    materialise(new, lambda shard, meta: live[shard])
    with torch.no_grad():
        old.model.embedding.weight.fill_(5.0)
    assert (new.model.embedding.weight == 5.0).all()


def test_what_is_real_already_is_left_alone() -> None:
    state = on_meta()
    materialise(state, fresh)
    materialise(state, lambda shard, meta: pytest.fail("nothing is on meta"))


def test_a_tensor_that_no_module_registers_is_refused_by_name() -> None:
    state = on_meta()
    state.model.embedding.mask = torch.empty(3, device="meta")
    with pytest.raises(EtcError, match=r"^model\.embedding\.mask would stay on the meta device"):
        materialise(state, fresh)


def test_a_tensor_of_the_wrong_shape_is_refused_by_name() -> None:
    with pytest.raises(EtcError, match=r"model\.frozen was given torch\.float32 \(1,\)"):
        materialise(on_meta(), lambda shard, meta: torch.zeros(1))
