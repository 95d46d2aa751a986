"""The planner's errors."""

from __future__ import annotations


class PlanError(ValueError):
    """The inputs of a plan contradict each other or cannot be met. The message says which tensor, worker or limit."""


class MissingSourceError(PlanError):
    """A needed box is held by no live worker."""
