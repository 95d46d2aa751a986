"""`etc-ctl check`: what a script would be refused for, what a change loses and what init leaves without a value."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import etc_agent as etc
from etc_agent.check import main
from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.checking import Answer, Kind, check
from etc_agent.worker.data.division import GlobalBatch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.register_buffer("mask", torch.ones(4), persistent=False)


def build(parallel: etc.ParallelContext, init: Any = "module") -> etc.TrainState:
    if parallel.config.tp > 1:
        raise ValueError("tp must be 1")
    model = Net()
    return etc.TrainState(model, torch.optim.AdamW(model.parameters()), init=init)


def checked(script: Callable[..., Any], configs: str = "DP1,DP2", **options: Any) -> Answer:
    return check(script, [ParallelConfig.parse(each) for each in configs.split(",")], GlobalBatch(4), **options)


def found(answer: Answer) -> list[tuple[Kind, str, str]]:
    return [(each.kind, each.where, each.text) for each in answer.findings]


def test_a_script_with_nothing_wrong_has_no_findings() -> None:
    answer = checked(build)
    assert answer.is_fine
    assert not answer.findings
    assert [(each.config, each.num_ranks) for each in answer.built] == [("PP1TP1DP1", 1), ("PP1TP1DP2", 2)]


def test_a_config_that_the_model_or_the_global_batch_refuses_is_named_with_the_reason() -> None:
    answer = checked(build, "DP2,TP2,DP3")
    assert not answer.is_fine
    assert [(each.where, each.text.partition(";")[0]) for each in answer.findings] == [
        ("PP1TP2DP1", "tp must be 1"),
        ("PP1TP1DP3", "PP1TP1DP3: a global batch of 4 cannot be divided over dp=3"),
    ]


def test_what_init_leaves_without_a_value_is_named() -> None:
    answer = checked(lambda parallel: build(parallel, lambda state: state.model.up.reset_parameters()))
    ((kind, where, text),) = found(answer)
    assert (kind, where) == (Kind.REFUSED, "the start with PP1TP1DP1")
    assert text.startswith("model.mask has no value at the job's start: TrainState.init did not write all of it")


def test_weights_are_compared_with_the_model_of_all_ranks() -> None:
    weights = Net().state_dict()
    assert checked(lambda parallel: build(parallel, weights)).is_fine
    extra = {**weights, "old": torch.ones(1)}
    ((_, _, text),) = found(checked(lambda parallel: build(parallel, extra)))
    assert text.startswith("the state dict has old, which the model has not")


def test_state_that_a_change_loses_is_named_with_its_direction() -> None:
    def grows(parallel: etc.ParallelContext) -> etc.TrainState:
        state = build(parallel)
        if parallel.config.dp == 2:
            state.model.register_buffer("seen", torch.zeros(3))
        return state

    answer = checked(grows, "DP2,DP1")
    kinds = {each.where: (each.kind, each.text) for each in answer.findings}
    assert kinds["PP1TP1DP2 -> PP1TP1DP1"] == (
        Kind.LOST, "build() does not make model.seen there, so the values end"
    )
    assert kinds["PP1TP1DP1 -> PP1TP1DP2"][0] == Kind.REFUSED
    assert "model.seen" in kinds["PP1TP1DP1 -> PP1TP1DP2"][1]


def test_a_build_that_touches_the_process_or_keeps_its_model_is_unsuitable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OF_THE_MODEL", raising=False)
    kept = Net()

    def touches(parallel: etc.ParallelContext) -> etc.TrainState:
        torch.manual_seed(1)
        os.environ["OF_THE_MODEL"] = str(parallel.rank)
        return etc.TrainState(kept, None, init="module")

    torch.manual_seed(0)
    texts = [each.text for each in checked(touches).findings if each.kind == Kind.UNSUITABLE]
    assert "build() returns the same model in two calls; make it new in each" in texts
    assert any(text.startswith("build() changes the environment of the process") for text in texts)
    assert any(text.startswith("build() changes torch's random generator") for text in texts)


def test_a_model_too_large_to_try_is_said_to_be() -> None:
    ((kind, _, text),) = found(checked(build, most_bytes=10))
    assert kind == Kind.UNTRIED
    assert text.startswith("whether init writes all values: they take")


SCRIPT = """
import torch
import etc_agent as etc

def make(parallel):
    model = torch.nn.Linear(2, 2)
    if parallel.config.dp == 3:
        model.steps = object()
        raise KeyError("no data for three")
    return etc.TrainState(model, None, init="module")
"""


def test_the_command_says_it_in_words_or_json_and_ends_with_a_code(tmp_path: Path) -> None:
    script = tmp_path / "my_train.py"
    script.write_text(SCRIPT)
    runner = CliRunner()
    fine = runner.invoke(main, [f"{script}:make"])
    assert (fine.exit_code, fine.output.splitlines()[-1]) == (0, "nothing would be refused")
    refused = runner.invoke(main, [f"{script}:make", "--configs", "DP1,DP3", "--json"])
    assert refused.exit_code == 1
    (finding,) = json.loads(refused.output)["findings"]
    assert finding["text"] == "build() raised KeyError: 'no data for three'"
    for mistake in ([str(script)], [f"{tmp_path}/none.py:make"], [f"{script}:make", "--configs", "DPX"]):
        wrong = runner.invoke(main, mistake)
        assert wrong.exit_code == 2, wrong.output
