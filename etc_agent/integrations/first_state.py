"""Optimizer state whose first values only the optimizer knows: copies of the weights, sums of the first gradient.

Such state exists before the first step so that an `init` can load a checkpoint into it. What `init` did not write is
removed again, and the optimizer creates it in its first step as usual.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from etc_agent.errors import EtcError
from etc_agent.integrations.aliases import local_tensor
from etc_agent.integrations.marks import is_written
from etc_agent.integrations.tensors import optimizer_parameters
from etc_agent.integrations.train_state import TrainState
from etc_agent.torch_private.tensors import num_writes


@dataclass(frozen=True, slots=True)
class _Entries:
    """The state of one parameter before `init` runs. Its tensors with dimensions are marked."""

    param: torch.Tensor
    values: dict[str, Any]
    num_writes: dict[str, int]

    def unwritten(self, now: dict[str, Any]) -> list[str]:
        return [
            key
            for key, count in self.num_writes.items()
            if now.get(key) is self.values[key] and not is_written(local_tensor(now[key]), count)
        ]


@dataclass(frozen=True, slots=True)
class OptimizerEntries:
    """The optimizer entries of parameters whose first state is not known, by name."""

    optimizer: Optimizer | None
    entries: dict[str, _Entries]

    @classmethod
    def of(cls, state: TrainState, names: Iterable[str]) -> OptimizerEntries:
        """The entries as they are before `init`; marked, as far as they are tensors with dimensions."""
        if state.optimizer is None:
            return cls(None, {})
        params = optimizer_parameters(state.model, state.optimizer)
        return cls(
            state.optimizer, {name: _entries_of(params[name], state.optimizer.state[params[name]]) for name in names}
        )

    def leave_to_first_step(self) -> None:
        """Drop the state that `init` has not written.

        Raises:
            EtcError: `init` wrote a part of a parameter's state, and not the rest.
        """
        for name, before in self.entries.items():
            assert self.optimizer is not None
            now = self.optimizer.state.get(before.param, {})
            unwritten = before.unwritten(now)
            if not unwritten and (before.num_writes or now != before.values):
                continue
            if len(unwritten) < len(before.num_writes):
                raise EtcError(
                    f"TrainState.init wrote optimizer state of {name}, but not {', '.join(unwritten)}; "
                    "load all of a parameter's state, or none of it"
                )
            self.optimizer.state.pop(before.param, None)


def _entries_of(param: torch.Tensor, values: dict[str, Any]) -> _Entries:
    are_marked = {key: value for key, value in values.items() if isinstance(value, torch.Tensor) and value.dim()}
    return _Entries(
        param, dict(values), {key: num_writes(local_tensor(value)) for key, value in are_marked.items()}
    )
