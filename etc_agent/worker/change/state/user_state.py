"""State of the script that differs between ranks: a rule says how it is carried over to another config.

An extra (`TrainState.extras`) with a `rule` attribute is carried by that rule. One without it is `replicated`: equal on
every rank, and rank 0's is taken.

* ``per_rank``: a grid coordinate that exists before and after the change keeps its own state; a new one keeps what
  `build` made.
* ``per_sample``: the state is a dict keyed by sample. Every rank gets the union of all and drops what it does not need.
  Two ranks may have an entry for the same sample if the entries are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etc_agent.adapters.choose import adapter_of
from etc_agent.errors import EtcError
from etc_agent.integrations.host_state import load_extra
from etc_agent.integrations.json_values import decode, encode
from etc_agent.integrations.train_state import TrainState
from etc_agent.parallel.config import ParallelConfig

RULES = ("replicated", "per_rank", "per_sample")


def rules_of(state: TrainState) -> dict[str, str]:
    """The rule of every extra.

    Raises:
        EtcError: an extra has an unknown rule.
    """
    rules = {name: getattr(extra, "rule", "replicated") for name, extra in state.extras.items()}
    for name, rule in rules.items():
        if rule not in RULES:
            raise EtcError(f"extras[{name!r}].rule is {rule!r}; it must be one of {', '.join(RULES)}")
    return rules


def own_state(state: TrainState) -> dict[str, Any]:
    """This rank's own state, to be gathered from all ranks: extras with a rule, and optimizer state of this rank's
    parameters that is Python values."""
    own = {name for name, rule in rules_of(state).items() if rule != "replicated"}
    return {
        "extras": {name: encode(state.extras[name].state_dict(), f"extras.{name}") for name in sorted(own)},
        "parameters": adapter_of(state).parameter_values(state),
    }


def load_own_state(
    state: TrainState, gathered: Mapping[int, dict[str, Any]], previous: ParallelConfig, config: ParallelConfig,
    rank: int,
) -> None:
    """Load this rank's part under `config`. `gathered`: the own states of the ranks of `previous`, by rank, without
    those that were lost: what those alone had keeps what `build` made.

    Raises:
        EtcError: two ranks have different entries for one sample or one parameter.
    """
    adapter_of(state).load_parameter_values(state, [said["parameters"] for said in gathered.values()])
    at = config.coordinate(rank)
    for name, rule in rules_of(state).items():
        said_of_it = {old_rank: said["extras"].get(name) for old_rank, said in gathered.items()}
        if rule == "per_rank":
            for old_rank, value in said_of_it.items():
                if previous.coordinate(old_rank) == at:
                    load_extra(name, state.extras[name], decode(value))
        elif rule == "per_sample":
            load_extra(name, state.extras[name], _union(name, [decode(value) for value in said_of_it.values()]))


def _union(name: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    union: dict[str, Any] = {}
    for part in parts:
        for sample, value in part.items():
            if union.setdefault(sample, value) != value:
                raise EtcError(f"extras[{name!r}]: two ranks hold different state of sample {sample!r}")
    return union
