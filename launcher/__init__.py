"""What a person types, and `elastic_launch` for programs. Loaded when first used, since etc-ctl needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.api import JobFailed as JobFailed
    from launcher.api import JobStopped as JobStopped
    from launcher.api import LaunchConfig as LaunchConfig
    from launcher.api import elastic_launch as elastic_launch
    from launcher.api import launch_agent as launch_agent

__all__ = ["JobFailed", "JobStopped", "LaunchConfig", "elastic_launch", "launch_agent"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("launcher.api"), name)
