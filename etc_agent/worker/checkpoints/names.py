"""The names in a checkpoint: those of the logical tensors, and two of ours for what is not tensors.

``dcp_to_torch_save`` makes nested dicts of them: ``model`` by parameter, ``optimizer`` by parameter and key, ``rng`` by
grid coordinate, and ``etc_run``.
"""

from __future__ import annotations

from typing import Final

from etc_agent.parallel.config import Coordinate

HOST: Final = "etc_run.host"
"""JSON: the step, the config and the host state, equal on every rank."""
_OWN: Final = "etc_run.own_"
_STREAM: Final = "rng."


def own_name(rank: int) -> str:
    """Of the JSON of what rank `rank` alone had; left out where that is nothing."""
    return f"{_OWN}{rank}"


def stream_name(at: Coordinate) -> str:
    return f"{_STREAM}pp{at.pp}.dp{at.dp}.tp{at.tp}"


def path_of_name(name: str) -> tuple[str, ...]:
    """Where a reader that makes nested dicts puts the value."""
    first, _, rest = name.partition(".")
    if first == "optimizer":
        parameter, _, key = rest.rpartition(".")
        return (first, parameter, key)
    return (first, rest)
