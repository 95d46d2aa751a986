"""Shards of real sharded models against what DTensor itself gathers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launched_ranks import launch
from torch import nn

from etc_agent.errors import EtcError
from etc_agent.integrations.native import TrainState, shards_of


def test_every_shard_is_its_part_of_the_gathered_whole_for_uneven_tensor_parallel_and_fsdp_models() -> None:
    assert "shards agree" in launch(4, Path(__file__).with_name("shards_ranks.py"))


def test_a_tied_parameter_and_a_shared_buffer_are_listed_once() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    shared = torch.ones(2)
    model["embedding"].register_buffer("shared", shared)
    model["head"].register_buffer("shared", shared, persistent=False)
    names = [shard.tensor.name for shard in shards_of(TrainState(model, None))]
    assert names == ["model.embedding.weight", "model.embedding.shared"]


def test_local_tensors_are_live_views() -> None:
    model = nn.Linear(2, 2)
    shards = {shard.tensor.name: local for shard, local in shards_of(TrainState(model, None)).items()}
    shards["model.weight"].fill_(7.0)
    assert (model.weight == 7.0).all()


def test_an_optimizer_over_a_foreign_parameter_is_refused() -> None:
    state = TrainState(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 3).parameters()))
    with pytest.raises(EtcError, match=r"shape \(3, 2\) that the model does not have"):
        shards_of(state)


def test_optimizer_state_that_is_neither_a_tensor_nor_json_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    state = TrainState(model, torch.optim.SGD(model.parameters()))
    state.optimizer.state[model.bias]["seen"] = {3}
    with pytest.raises(EtcError, match=r"^optimizer\.bias\.seen is a set, which cannot be carried"):
        shards_of(state)
