"""Tensors of the new generation that are views of others, in `keep` mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from etc_agent.errors import EtcError
from etc_agent.integrations.native import TrainState, held_shards
from etc_agent.worker.change.modes.keeping import NewTensors, check_views


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("last", self.scale[-2:])


def live() -> tuple[NewTensors, dict[str, torch.Tensor], TrainState]:
    """What a new generation would be made of, and the tensors of the old one by name."""
    with torch.device("meta"):
        new = TrainState(Scaled(), None)
    old = TrainState(Scaled(), None)
    return NewTensors.of(new), _by_name(old), old


def _by_name(state: TrainState) -> dict[str, torch.Tensor]:
    return {shard.tensor.name: tensor for shard, tensor in held_shards(state).items()}


def test_views_that_are_views_in_the_old_generation_too_are_fine_whatever_memory_the_owner_has() -> None:
    new, tensors, old = live()
    assert [view.name for view in new.views] == ["model.last"]
    check_views(new.views, tensors)
    old.model.scale.data = torch.zeros(20)[3:11]
    old.model.last.data = old.model.scale[-2:]
    check_views(new.views, _by_name(old))


def test_a_view_that_has_got_memory_of_its_own_is_refused_by_name() -> None:
    new, _, old = live()
    for memory in (torch.ones(2), old.model.scale.data[:2], old.model.scale.data[1::4]):
        old.model.last.data = memory
        with pytest.raises(EtcError, match=r"model\.last is a view of model\.scale where build\(\) makes it"):
            check_views(new.views, _by_name(old))
