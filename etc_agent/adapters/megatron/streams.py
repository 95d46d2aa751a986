"""The random streams of Megatron's tracker, carried by grid coordinate."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any, Final

import numpy as np
import torch

from etc_agent.adapters.megatron import globals as megatron_globals
from etc_agent.adapters.megatron.globals import Globals


class Streams:
    """An extra of the state. A coordinate that is there before and after a change keeps its streams bit for bit; a new
    one has those that ``model_parallel_cuda_manual_seed`` gives it."""

    rule: Final = "per_rank"

    def __init__(self, generation: Globals) -> None:
        self._generation = generation

    def state_dict(self) -> dict[str, Any]:
        if not megatron_globals.is_in_force(self._generation):
            return {name: _text(state) for name, state in self._generation.streams.items()}
        return {name: _text(state) for name, state in megatron_globals.streams().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        states = {name: _state(text) for name, text in state_dict.items()}
        if megatron_globals.is_in_force(self._generation):
            megatron_globals.set_streams(states)
        else:
            self._generation.streams = states


def _text(state: torch.Tensor) -> str:
    return b64encode(state.cpu().numpy().tobytes()).decode()


def _state(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(b64decode(text), dtype=np.uint8).copy())
