"""What a script has made of its state goes over to other sizes, workers that join included, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mini_agent import NODE, MiniAgent

from etc_agent.control.messages import Armed, Prepared, Refused
from etc_agent.parallel.topology import Slot

JOB = "amended_job"


def run(
    directory: Path, optimizer: str, actions: list[Any], configs: tuple[str, ...], num_steps: int | None = None,
    migration: str = "auto",
) -> list[dict[str, Any]]:
    """The lines of a job that goes from config to config once all actions are done, and some steps further; with
    `num_steps`, of one that stays in the first config."""
    directory.mkdir()
    last_action = max((step for step, _ in actions), default=0)
    with MiniAgent(
        directory, pause_s=0.02 if num_steps is None else 0.0, num_steps=num_steps or 1_000_000, verify=False, job=JOB,
        fault={"optimizer": optimizer, "actions": actions, "migration": migration},
    ) as agent:
        agent.start(configs[0])
        if num_steps is None:
            agent.wait_for(lambda: any(line["step"] >= last_action for line in agent.steps()), "the actions")
            for config in configs[1:]:
                agent.change(config)
                agent.first_steps()
            agent.last_step_in(10)
        assert set(agent.finish().values()) == {0}, agent.logs()
        return agent.steps()


def by_step(lines: list[dict[str, Any]], key: str) -> dict[int, dict[str, Any]]:
    """Step -> what the ranks say of it together."""
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        value = line[key] if isinstance(line[key], dict) else dict.fromkeys(line[key], True)
        for name, said in value.items():
            assert found.setdefault(line["step"], {}).setdefault(name, said) == said, (line["step"], name)
    return found


@pytest.mark.parametrize(
    ("optimizer", "actions", "migration"),
    [
        ("AdamW", [[2, "freeze"], [3, "unfreeze"], [4, "add group"]], "auto"),
        ("numbers per parameter", [[2, "freeze"], [3, "unfreeze"]], "release"),
        ("slow weights", [[3, "unfreeze"]], "auto"),
        ("quantised", [], "auto"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_changing_job_has_the_weights_of_one_that_does_not_change(
    tmp_path: Path, optimizer: str, actions: list[Any], migration: str
) -> None:
    lines = run(tmp_path / "changing", optimizer, actions, ("PP1", "PP3", "PP2"), migration=migration)
    assert {line["generation"] for line in lines} == {1, 2, 3}
    last = max(line["step"] for line in lines)
    expected = run(tmp_path / "fixed", optimizer, actions, ("PP1",), num_steps=last + 1)
    for key in ("weights", "trainable"):
        assert by_step(lines, key) == by_step(expected, key)
    rates = {line["step"]: line["lr"] for line in expected}
    for line in lines:
        assert line["lr"] == rates[line["step"]], "every rank has the learning rates of all groups"
    if "freeze" in dict(map(reversed, actions)):
        assert not any("layers.0" in line["training"] for line in lines if line["step"] == last)


def test_replicas_that_join_train_as_those_that_stay(tmp_path: Path) -> None:
    lines = run(tmp_path / "job", "AdamW", [[2, "freeze"], [3, "unfreeze"], [4, "add group"]], ("DP1", "DP3"))
    by_step(lines, "weights")  # compares the ranks
    joined = [line for line in lines if line["rank"] == 2]
    assert joined
    for line in joined:
        assert line["lr"] == [0.01, 1 / 128]
        assert not any(name.startswith("layers.0") for name in line["trainable"])
        assert any(name.startswith("layers.1") for name in line["trainable"])


def test_what_only_some_replicas_have_frozen_is_refused_by_name_and_training_goes_on(tmp_path: Path) -> None:
    fault = {"optimizer": "AdamW", "actions": [[2, "freeze"]], "only_rank": 1}
    with MiniAgent(tmp_path, pause_s=0.02, verify=False, job=JOB, fault=fault) as agent:
        agent.start("DP2")
        agent.wait_for(lambda: any(line["step"] > 2 for line in agent.steps()), "the action")
        generation, everyone = agent.prepare("DP1")
        errors = {agent.hear(each, Refused, generation=generation.id).error for each in everyone}
        assert len(errors) == 1
        assert "was frozen or unfrozen on some of the ranks that hold it and not on others" in errors.pop()
        agent.withdraw(generation, everyone)
        last = max(line["step"] for line in agent.steps())
        agent.wait_for(lambda: any(line["step"] > last + 2 for line in agent.steps()), "more steps")


def test_a_number_that_a_module_counts_up_is_named_with_the_remedy(tmp_path: Path) -> None:
    fault = {"optimizer": "AdamW", "actions": [[2, "count"]]}
    with MiniAgent(tmp_path, pause_s=0.02, verify=False, job=JOB, fault=fault) as agent:
        agent.start("PP2")
        agent.wait_for(lambda: any(line["step"] > 2 for line in agent.steps()), "the action")
        generation, everyone = agent.prepare("PP1")
        for each in everyone:
            agent.hear(each, Prepared, generation=generation.id)
        logs = [(tmp_path / f"worker-{index}-gen1.log").read_text() for index in range(2)]
        assert "model.layers.0.num_calls (0 -> 1), model.layers.1.num_calls (0 -> 1) changed since build()" in logs[0]
        assert "register_buffer" in logs[0]
        assert "TrainState.extras" in logs[1]
        assert "model.layers.3.num_calls" in logs[1]
        agent.withdraw(generation, everyone)


def test_a_parameter_frozen_after_the_preparation_is_named_and_the_next_change_carries_it(tmp_path: Path) -> None:
    fault = {"optimizer": "AdamW", "actions": [[40, "freeze"]]}
    with MiniAgent(tmp_path, pause_s=0.02, verify=False, job=JOB, fault=fault) as agent:
        agent.start("PP2")
        generation, everyone = agent.prepare("DP2")
        for each in everyone:
            agent.hear(each, Prepared, generation=generation.id)
        agent.wait_for(lambda: all(agent_reached(agent, slot, 41) for slot in range(2)), "the action")
        for each in everyone:
            agent.send(each, Armed(generation.id))
        reason = agent.hear(Slot(NODE, 0), Refused, generation=generation.id).error
        assert "layers.0.inner.bias, layers.0.inner.weight" in reason
        assert "since the change was prepared; it has to be prepared again" in reason
        agent.change("DP2")
        agent.first_steps()
        agent.last_step_in(5)
        agent.finish()
        lines = [line for line in agent.steps() if line["generation"] == 3]
        assert {line["rank"] for line in lines} == {0, 1}
        assert not any(name.startswith("layers.0") for line in lines for name in line["trainable"])


def agent_reached(agent: MiniAgent, rank: int, step: int) -> bool:
    return any(line["rank"] == rank and line["step"] >= step for line in agent.steps())
