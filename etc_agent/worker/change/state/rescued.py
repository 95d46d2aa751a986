"""What a worker gives in place of workers that were lost, from the copies that it kept of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from etc_agent.state.layout import Shard
from etc_agent.worker.change.state.rng import STREAM_PREFIX


@dataclass(frozen=True, slots=True, eq=False)
class Rescued:
    """`tensors`: parts that lost workers held -> their values, each with memory of its own where the state lives;
    random streams on the host. `values`: lost rank -> its own state (`user_state.own_state`)."""

    tensors: Mapping[Shard, torch.Tensor] = field(default_factory=dict)
    values: Mapping[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def streams(self) -> list[str]:
        """The names of the random streams among the tensors."""
        return [shard.tensor.name for shard in self.tensors if shard.tensor.name.startswith(STREAM_PREFIX)]

    @property
    def has_parameter_values(self) -> bool:
        """Whether the optimizer of a lost worker kept Python values for some parameters."""
        return any(said["parameters"] for said in self.values.values())


NOTHING = Rescued()
