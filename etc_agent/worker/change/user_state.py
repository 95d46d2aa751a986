"""A script's own state that is not the same on every rank: it says by a rule how it goes over to another config.

An extra (`TrainState.extras`) with a `rule` attribute is carried by that rule; one without is `replicated`, equal on
every rank, and rank 0's is taken.

* ``per_rank``: a coordinate of the grid that exists before and after keeps its own; a new one keeps what `build` made.
* ``per_sample``: its state is a dict by sample; every rank gets the union of all, and drops what it
  does not need. Two ranks may have the same sample if they say the same of it.
"""

from __future__ import annotations

from typing import Any

from etc_agent.errors import EtcError
from etc_agent.integrations.json_values import decode, encode
from etc_agent.integrations.parameter_values import load_parameter_values, parameter_values
from etc_agent.integrations.train_state import TrainState
from etc_agent.parallel.config import ParallelConfig

RULES = ("replicated", "per_rank", "per_sample")


def rules_of(state: TrainState) -> dict[str, str]:
    """The rule of every extra.

    Raises:
        EtcError: there is no such rule.
    """
    rules = {name: getattr(extra, "rule", "replicated") for name, extra in state.extras.items()}
    for name, rule in rules.items():
        if rule not in RULES:
            raise EtcError(f"extras[{name!r}].rule is {rule!r}; it must be one of {', '.join(RULES)}")
    return rules


def own_state(state: TrainState) -> dict[str, Any]:
    """What this rank has to say of its own, to be gathered from all: extras with a rule, and what the optimizer keeps
    of this rank's parameters in Python values."""
    own = {name for name, rule in rules_of(state).items() if rule != "replicated"}
    return {
        "extras": {name: encode(state.extras[name].state_dict(), f"extras.{name}") for name in sorted(own)},
        "parameters": parameter_values(state),
    }


def load_own_state(
    state: TrainState, gathered: list[dict[str, Any]], previous: ParallelConfig, config: ParallelConfig, rank: int
) -> None:
    """Give this rank of `config` its part; `gathered` has what the ranks of `previous` said, in their order.

    Raises:
        EtcError: two ranks contradict each other, about a sample or about a parameter.
    """
    load_parameter_values(state, [said["parameters"] for said in gathered])
    at = config.coordinate(rank)
    for name, rule in rules_of(state).items():
        said_of_it = [said["extras"].get(name) for said in gathered]
        if rule == "per_rank":
            for old_rank, value in enumerate(said_of_it):
                if previous.coordinate(old_rank) == at:
                    state.extras[name].load_state_dict(decode(value))
        elif rule == "per_sample":
            state.extras[name].load_state_dict(_union(name, [decode(value) for value in said_of_it]))


def _union(name: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    union: dict[str, Any] = {}
    for part in parts:
        for sample, value in part.items():
            if union.setdefault(sample, value) != value:
                raise EtcError(f"extras[{name!r}]: two ranks hold different state of sample {sample!r}")
    return union
