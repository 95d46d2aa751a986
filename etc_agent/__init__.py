"""Elastic training: worker processes stay alive while the job changes size.

In a training script: ``import etc_agent as etc``, then `etc.session`. The names here are loaded when first used, so
that the rooms that need no torch can be imported without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etc_agent.control.checkpoint_settings import Checkpoint as Checkpoint
    from etc_agent.errors import EtcError as EtcError
    from etc_agent.integrations.layouts import Piece as Piece
    from etc_agent.integrations.layouts import cut as cut
    from etc_agent.integrations.layouts import flat_range as flat_range
    from etc_agent.integrations.train_state import TrainState as TrainState
    from etc_agent.integrations.train_state import Weights as Weights
    from etc_agent.migration.library import migrate as migrate
    from etc_agent.parallel.config import ParallelConfig as ParallelConfig
    from etc_agent.weights import migrate_weights as migrate_weights
    from etc_agent.worker.context import ParallelContext as ParallelContext
    from etc_agent.worker.process.heartbeat import heartbeat as heartbeat
    from etc_agent.worker.session import Session as Session
    from etc_agent.worker.session import Step as Step
    from etc_agent.worker.session import session as session

    __version__: str

_HOMES = {
    "Checkpoint": "etc_agent.control.checkpoint_settings",
    "EtcError": "etc_agent.errors",
    "ParallelConfig": "etc_agent.parallel.config",
    "ParallelContext": "etc_agent.worker.context",
    "Piece": "etc_agent.integrations.layouts",
    "Session": "etc_agent.worker.session",
    "Step": "etc_agent.worker.session",
    "TrainState": "etc_agent.integrations.train_state",
    "Weights": "etc_agent.integrations.train_state",
    "cut": "etc_agent.integrations.layouts",
    "flat_range": "etc_agent.integrations.layouts",
    "heartbeat": "etc_agent.worker.process.heartbeat",
    "migrate": "etc_agent.migration.library",
    "migrate_weights": "etc_agent.weights",
    "session": "etc_agent.worker.session",
}

__all__ = [
    "EtcError", "ParallelConfig", "ParallelContext", "Piece", "Session", "Step", "TrainState", "Weights", "__version__",
    "cut", "flat_range", "heartbeat", "migrate", "migrate_weights", "session",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from etc_agent.version import version

        return version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
