"""The state that is not tensors (*host state*), at a switch: from the old ranks to every worker, and into the new
state.

Everybody takes that of the crew's first worker, which is old rank 0 unless that was lost. An extra may have state of
its own on each rank (`user_state`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from etc_agent.adapters.choose import adapter_of
from etc_agent.errors import one_line
from etc_agent.worker.change.exchange import broadcast_json, gather_json
from etc_agent.worker.change.phases import Phases
from etc_agent.worker.change.prepared import PreparedGeneration
from etc_agent.worker.change.state.user_state import load_own_state, own_state, rules_of
from etc_agent.worker.live import LiveGeneration

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostValues:
    """The host state of all old ranks; equal on every worker.

    `step`: the first step of the new generation. `shared`: the state of the crew's first worker, which is old rank 0
    unless that was lost; `own`: each old rank's own part, without those of lost ranks of which there is no copy.
    `error`: why one of them could not be read from the script's objects, "" if all could. `arrived`: when this worker
    had received them (`time.perf_counter`); a worker that joins has waited until then.
    """

    step: int
    shared: dict[str, Any]
    own: dict[int, dict[str, Any]]
    error: str
    arrived: float


NO_VALUES = HostValues(0, {}, {}, "", 0.0)


def share(prepared: PreparedGeneration, live: LiveGeneration | None, step: int, phases: Phases) -> HostValues:
    """Exchange the host state. `step`: the next step, on a worker of the old generation.

    Raises:
        RuntimeError: a worker was lost.
    """
    value = None
    if live is not None:
        with phases.phase("host_state"):
            if prepared.crew.worker == 0:
                has_own = prepared.has_values or bool(set(rules_of(live.state).values()) - {"replicated"})
                said = _read(lambda: adapter_of(live.state).host_state(live.state))
                value = {"step": step, "has_own": has_own, **said}
            value = broadcast_json(prepared.group, 0, value)
    else:
        value = broadcast_json(prepared.group, 0, None)
    arrived = time.perf_counter()
    own: dict[int, dict[str, Any]] = {}
    if value["has_own"]:
        with phases.phase("own_state"):
            said = {} if live is None else _read(lambda: own_state(live.state))
            if prepared.holdings is not None:
                said["rescued"] = prepared.holdings.rescued.values
            rows = gather_json(prepared.group, said)
            own = {rank: row for rank, row in zip(prepared.crew.old_ranks, rows, strict=True) if rank is not None}
            for row in rows:
                for rank, state in row.get("rescued", {}).items():
                    own[int(rank)] = {"state": state, "error": ""}
    error = next((said["error"] for said in (value, *own.values()) if said["error"]), "")
    parts = {rank: said["state"] for rank, said in own.items()}
    return HostValues(value["step"], value["state"], parts, error, arrived)


def load(values: HostValues, prepared: PreparedGeneration) -> None:
    """Load the values into the new generation, if this worker is part of it."""
    following = prepared.next
    if following is None:
        return
    adapter_of(following.state).load_host_state(following.state, values.shared)
    if values.own:
        previous, config = prepared.previous.config, prepared.generation.config
        load_own_state(following.state, values.own, previous, config, following.parallel.rank)


def _read(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `read` returns, or the error that the script's `state_dict` raises, to be sent to every worker."""
    try:
        return {"state": read(), "error": ""}
    except Exception as error:
        _log.warning("the script's state cannot be read", exc_info=True)
        return {"state": {}, "error": one_line(error)}
