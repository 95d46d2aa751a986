"""Holdings: what a worker holds of its generation's state, as the main thread found it at a safe point.

Live modules are read only by the main thread and only at a safe point: during a step, modules may hold other tensors
than their state (FSDP2 registers unsharded parameters from before forward to after backward). Code that runs beside
training is given this value instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from etc_agent.adapters.choose import adapter_of
from etc_agent.errors import EtcError
from etc_agent.integrations.amendments import Amendments
from etc_agent.integrations.train_state import TrainState
from etc_agent.state.layout import Shard
from etc_agent.worker.change.state.rescued import NOTHING, Rescued

_MOST_NAMES = 5


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """`tensors`: every box of the state, including views of other tensors: this worker's shard -> the part of a local
    plain tensor, which shares the live tensor's storage and is detached from autograd. `amendments`: what the script
    has changed since `build`. `changed_numbers`: plain numeric attributes that have changed, with old and new value.
    `has_values`: whether the optimizer keeps Python values for some parameters. `rescued`: what this worker gives in
    place of workers that were lost."""

    tensors: Mapping[Shard, torch.Tensor]
    amendments: Amendments
    changed_numbers: Mapping[str, tuple[float | None, float]]
    has_values: bool
    rescued: Rescued = NOTHING

    @classmethod
    def of(cls, state: TrainState) -> Holdings:
        """Take down `state` as it is now. Call it on the main thread, at a safe point.

        Raises:
            EtcError: the state contains something that cannot be moved; the message names it.
        """
        adapter = adapter_of(state)
        adapter.rest(state)
        return cls(
            adapter.held(state), adapter.amendments(state), adapter.changed_numbers(state),
            adapter.has_parameter_values(state),
        )

    def check_same_shards(self, now: Holdings) -> None:
        """Check that `now`, taken later, has the same shards, so that a plan made for the first is valid for the
        second.

        Raises:
            EtcError: tensors were added, removed, or have another shape, dtype or sharding; the message names them.
        """
        if self.tensors.keys() != now.tensors.keys():
            changed = dict.fromkeys(shard.tensor.name for shard in self.tensors.keys() ^ now.tensors.keys())
            names = sorted(changed)
            others = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            raise EtcError(
                f"{', '.join(names[:_MOST_NAMES])}{others}: added, removed, or of another shape, dtype or sharding "
                "since the change was prepared; it has to be prepared again"
            )
