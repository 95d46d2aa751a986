"""Workers are killed without notice: the survivors freeze, agree, and go on with the same step in a smaller config.

Each run is compared, bit for bit, with one that makes the same change at the same step as a planned one.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import deaths
import pytest
from mini_agent import NODE, MiniAgent

from etc_agent.control.messages import Armed, Prepared
from etc_agent.parallel.topology import Slot

NUM_STEPS, FATAL_STEP = 11, 6
Bits = dict[tuple[int, int], tuple[str, float]]
"""(step, rank) -> the digest of the state after it, and the loss."""


def slot(index: int) -> Slot:
    return Slot(NODE, index)


def bits(agent: MiniAgent) -> Bits:
    return {(line["step"], line["rank"]): (line["digest"], line["loss"]) for line in agent.steps()}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The bits of a run whose first step in another config is the one that is asked for."""

    @functools.cache
    def run(model: str, before: str, after: str, survivors: tuple[int, ...], step: int) -> Bits:
        folder = tmp_path_factory.mktemp("planned")
        fault = {"model": model, "gates": [step - 3, step - 1]}
        with MiniAgent(folder, num_steps=NUM_STEPS, job="mortal_job", fault=fault, verify=False, pause_s=0) as agent:
            agent.start(before)
            num_workers = len(agent.workers)

            def await_gate(at: int) -> None:
                agent.wait_for(lambda: len(list(folder.glob(f"at-{at}-*"))) == num_workers, f"the gate of step {at}")

            await_gate(step - 3)
            generation, everyone = agent.prepare(after, tuple(map(slot, survivors)))
            (folder / f"open-{step - 3}").touch()
            await_gate(step - 1)
            for each in everyone:
                agent.hear(each, Prepared, generation=generation.id)
                agent.send(each, Armed(generation.id))
                agent.describe(each, "nothing")  # answered after Armed was handled
            (folder / f"open-{step - 1}").touch()
            agent.commit(generation, everyone)
            agent.finish()
            return bits(agent)

    return run


def assert_same_bits(found: Bits, expected: Bits) -> None:
    assert found.keys() == expected.keys()
    assert {key for key in found if found[key] != expected[key]} == set()


@pytest.mark.parametrize("point", deaths.IN_A_STEP)
def test_a_death_at_any_point_of_a_step_leaves_all_with_the_same_bits(tmp_path: Path, point: str, planned: Any) -> None:
    fault = {"model": "plain", "die": point, "slot": 3, "at": FATAL_STEP}
    with MiniAgent(tmp_path, num_steps=NUM_STEPS, job="mortal_job", fault=fault, verify=False, pause_s=0) as agent:
        agent.start("DP4")
        agent.await_death(slot(3))
        agreed = agent.agree(agent.freeze())
        agent.recover("DP3")
        assert set(agent.finish().values()) == {0}
        found = bits(agent)
    if point != "in the vote":
        is_seen = point in ("after the vote", "in the optimizer")
        assert agreed.step == FATAL_STEP + is_seen
    expected = planned("plain", "DP4", "DP3", (0, 1, 2), agreed.step)
    # A worker that dies in the update of a step has not come to write it down.
    assert_same_bits(found, {key: value for key, value in expected.items() if key != (FATAL_STEP, 3)})
