"""The rules by which a script's own state goes over to another config."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from etc_agent.errors import EtcError
from etc_agent.integrations.native import TrainState, host_state, load_host_state
from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.change.state.user_state import load_own_state, own_state, rules_of


class Extra:
    def __init__(self, value: Any, rule: str | None = None) -> None:
        self.value = value
        if rule is not None:
            self.rule = rule

    def state_dict(self) -> dict[str, Any]:
        return self.value

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict


def state_of(**extras: Extra) -> TrainState:
    return TrainState(nn.Linear(1, 1), None, extras=dict(extras))


def test_each_extra_is_carried_by_one_way_alone() -> None:
    state = state_of(plain=Extra({"a": 1}), own=Extra({"b": 2}, "per_rank"))
    assert own_state(state) == {"extras": {"own": {"dict": [["b", 2]]}}, "parameters": {}}
    other = state_of(plain=Extra({}), own=Extra({"b": 0}, "per_rank"))
    load_host_state(other, host_state(state))
    assert (other.extras["plain"].value, other.extras["own"].value) == ({"a": 1}, {"b": 0})


@pytest.mark.parametrize(("rank", "expected"), [(0, 0), (1, "new"), (2, 1), (3, "new")])
def test_a_coordinate_keeps_its_own_and_a_new_one_what_build_made(rank: int, expected: Any) -> None:
    said = {old: own_state(state_of(own=Extra({"place": old}, "per_rank"))) for old in range(2)}
    state = state_of(own=Extra({"place": "new"}, "per_rank"))
    load_own_state(state, said, ParallelConfig(2, 1, 1), ParallelConfig(2, 2, 1), rank)
    assert state.extras["own"].value == {"place": expected}


def test_samples_are_brought_together_and_contradictions_refused() -> None:
    def said(*parts: dict[int, str]) -> dict[int, dict[str, Any]]:
        return {rank: own_state(state_of(seen=Extra(part, "per_sample"))) for rank, part in enumerate(parts)}

    state, two, one = state_of(seen=Extra({}, "per_sample")), ParallelConfig(1, 1, 2), ParallelConfig(1, 1, 1)
    load_own_state(state, said({1: "a", 2: "b"}, {2: "b", 3: "c"}), two, one, 0)
    assert state.extras["seen"].value == {1: "a", 2: "b", 3: "c"}
    with pytest.raises(EtcError, match=r"extras\['seen'\]: two ranks hold different state of sample 2"):
        load_own_state(state, said({2: "b"}, {2: "x"}), two, one, 0)


def test_an_unknown_rule_is_refused_by_name() -> None:
    with pytest.raises(EtcError, match=r"extras\['own'\].rule is 'mine'; it must be one of replicated, per_rank"):
        rules_of(state_of(own=Extra({}, "mine")))
