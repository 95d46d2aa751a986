"""From meta to real tensors, in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from etc_agent.errors import EtcError
from etc_agent.integrations.native import TrainState, create_optimizer_state, held_shards, materialise, shards_of
from etc_agent.integrations.tensors import Placed


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


def fresh(placed: Placed, meta: torch.Tensor) -> torch.Tensor:
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


class Views(nn.Module):
    """A table, another parameter of the same memory, a few rows of it, its bytes, and one column as a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Parameter(torch.empty(0))
        self.table = nn.Parameter(torch.empty(6, 4))
        self.tied = nn.Parameter(self.table.data)
        self.few = nn.Parameter(self.table.data[2:4], requires_grad=False)
        self.register_buffer("bits", self.table.data.view(torch.int32).T)
        self.register_buffer("apart", self.table.data[:, 1].clone())
        self.register_buffer("column", self.apart[::2])


def test_views_of_a_tensor_are_state_once_and_are_views_of_it_again() -> None:
    with torch.device("meta"):
        model = Views()
        state = TrainState(model, torch.optim.SGD(model.parameters()))
    assert [shard.tensor.name for shard in shards_of(state)] == ["model.table", "model.apart"]
    materialise(state, lambda shard, meta: torch.arange(meta.numel(), dtype=meta.dtype).view(meta.shape))
    assert isinstance(model.tied, nn.Parameter)
    assert model.tied.requires_grad
    assert not model.few.requires_grad
    assert torch.equal(model.few.data, model.table.data[2:4])
    assert torch.equal(model.bits, model.table.data.view(torch.int32).T)
    with torch.no_grad():
        model.few[1, 0] = -1.0
    assert model.table[3, 0] == model.tied[3, 0] == -1.0
    assert model.bits[0, 3] == torch.tensor(-1.0).view(torch.int32)
    model.apart[2] = 7.0
    assert model.column.tolist() == [0.0, 7.0, 4.0]
    assert [shard.tensor.name for shard in shards_of(state)] == ["model.table", "model.apart"]
    assert {shard.tensor.name for shard in held_shards(state)} >= {"model.tied", "model.few", "model.bits"}


def test_a_view_that_no_module_registers_is_refused_by_the_name_of_its_tensor() -> None:
    state = on_meta()
    state.model.first_row = state.model.kept[:1]
    with pytest.raises(EtcError, match=r"^model\.kept cannot get its memory.*register views of it as buffers"):
        materialise(state, fresh)


def test_tensors_that_overlap_otherwise_are_refused_by_name() -> None:
    flat = torch.empty(8, device="meta")
    model = nn.Module()
    model.register_buffer("first", flat[:5])
    model.register_buffer("second", flat[3:])
    with pytest.raises(EtcError, match=r"^model\.first and model\.second overlap in one storage"):
        materialise(TrainState(model, None), fresh)


def test_parts_of_one_storage_that_do_not_overlap_are_tensors_of_their_own() -> None:
    flat = torch.empty(8, device="meta")
    model = nn.Module()
    model.register_buffer("first", flat[:5])
    model.register_buffer("second", flat[5:])
    state = TrainState(model, None)
    materialise(state, fresh)
    assert [shard.num_bytes for shard in shards_of(state)] == [20, 12]


def test_storage_can_be_shared_with_a_live_state() -> None:
    old, new = on_meta(), on_meta()
    materialise(old, fresh)
    live = shards_of(old)
    materialise(new, lambda placed, meta: live[placed.shard])
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
