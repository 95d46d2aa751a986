"""Repeats on a newly built state what the script has changed on the old one, and refuses a change that would lose
state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from etc_agent.adapters.choose import adapter_of
from etc_agent.control.causes import ErrorKind, kind_of
from etc_agent.errors import EtcError, one_line
from etc_agent.integrations.amendments import Amendments
from etc_agent.integrations.train_state import TrainState
from etc_agent.worker.change.state.holdings import Holdings
from etc_agent.worker.world.swap import World, entered

_log = logging.getLogger(__name__)

_MOST_NAMES = 5

Said = Sequence[Mapping[str, Any]]
"""What workers say of their old state, once for all that say the same: their `amendments` as JSON; whether their
optimizer `has_values`, which is state of parameters that is not tensors; and the `streams` of lost workers that they
have copies of."""


def amendments_of(holdings: Holdings | None) -> dict[str, Any]:
    """What this worker says of its old state; nothing where it joins."""
    if holdings is None:
        return {"amendments": {}, "has_values": False, "streams": []}
    return {
        "amendments": holdings.amendments.to_json(),
        "has_values": holdings.has_values or holdings.rescued.has_parameter_values,
        "streams": sorted(holdings.rescued.streams),
    }


def amend(state: TrainState | None, world: World | None, said: Said) -> tuple[ErrorKind, str] | None:
    """Change `state` (None on a worker that leaves) as the script has changed the old state; returns a refusal, if
    any."""
    try:
        amendments = _merged(said)
        if state is not None and world is not None:
            with entered(world):
                adapter_of(state).amend(state, amendments)
    except Exception as error:
        return kind_of(error), one_line(error)
    return None


def check_carried(said: Said, held: Sequence[set[str]], wanted: set[str]) -> list[str]:
    """Check that the next generation has a place for all optimizer state, and that all ranks of a parameter have
    changed it alike. `held`: the tensors of the workers that entry i of `said` is of; `wanted`: those of the next
    generation.

    Returns the tensors of the old model that the new one does not have, to be named in a warning.

    Raises:
        EtcError: one of the checks fails; the message names the tensors.
    """
    _check_replicas([row["amendments"] for row in said], held)
    gone = sorted({name for names in held for name in names} - wanted)
    _refuse(
        [name for name in gone if name.startswith("optimizer.") and f"model.{_parameter_of(name)}" in wanted],
        "the optimizer has made state in a later step that it does not make in its first; make it in the first step",
    )
    missing = {name for name in _merged(said).names() if f"model.{name}" not in wanted}
    _refuse(
        sorted(missing), "the script has changed this parameter or given it to the optimizer, and the model that "
        "build() returns has none of that name; make it in build()",
    )
    return [name for name in gone if name.startswith("model.")]


def warn_of_losses(generation: int, dropped: Sequence[str], holdings: Holdings | None, is_first: bool) -> None:
    """Log which state the next generation does not take over. `is_first`: first of the ranks with the same
    parameters."""
    if dropped:
        _log.warning(
            "generation %d has no %s, whose values end with this one: build() does not make them",
            generation, _shown(dropped),
        )
    if holdings is not None and is_first and holdings.changed_numbers:
        changes = [
            f"{name} ({'none' if before is None else before} -> {now})"
            for name, (before, now) in holdings.changed_numbers.items()
        ]
        _log.warning(
            "%s changed since build() and will be as build() makes it again in generation %d: plain attributes are not "
            "state; make it a buffer (register_buffer), or carry it in TrainState.extras",
            _shown(changes), generation,
        )


def _merged(said: Said) -> Amendments:
    return Amendments.merged([row["amendments"] for row in said])


def _check_replicas(said: Sequence[Mapping[str, Any]], held: Sequence[set[str]]) -> None:
    for key in ("trainable", "with_state"):
        for name in {name for row in said for name in row.get(key, {})}:
            holders = [row for row, names in zip(said, held, strict=True) if f"model.{name}" in names]
            if len({row.get(key, {}).get(name) for row in holders}) > 1:
                what = "frozen or unfrozen" if key == "trainable" else "updated by the optimizer"
                raise EtcError(f"{name} was {what} on some of the ranks that hold it and not on others; do it on all")


def _refuse(names: Sequence[str], why: str) -> None:
    if names:
        raise EtcError(f"{_shown(names)} would be lost: {why}")


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _parameter_of(name: str) -> str:
    """``optimizer.<parameter>.<key>`` -> the parameter."""
    return name.removeprefix("optimizer.").rpartition(".")[0]
