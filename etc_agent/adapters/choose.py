"""Which adapter there is for a state, or for what a script gives to the session."""

from __future__ import annotations

from typing import Any, Final

from etc_agent.adapters.native import Native
from etc_agent.adapters.protocol import Adapter
from etc_agent.integrations.train_state import TrainState

_NATIVE: Final[Adapter] = Native()


def adapter_of(state: TrainState) -> Adapter:
    """The adapter that has built `state`; the native one for a state that was made by hand."""
    return state.adapter if state.adapter is not None else _NATIVE


def as_adapter(build: Any) -> Adapter:
    """`build`, if it is an adapter; else the native one around that function."""
    return build if hasattr(build, "publish") and hasattr(build, "build") else Native(build)
