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
from etc_agent.parallel.config import ParallelConfig
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


def survive(folder: Path, model: str, before: str, after: str, victim: int, point: str) -> tuple[Bits, int]:
    """Lose one worker in the fatal step; the bits of the run, and the step that the survivors have agreed on."""
    fault = {"model": model, "die": point, "slot": victim, "at": FATAL_STEP}
    with MiniAgent(folder, num_steps=NUM_STEPS, job="mortal_job", fault=fault, verify=False, pause_s=0) as agent:
        agent.start(before)
        agent.await_death(slot(victim))
        agreed = agent.agree(agent.freeze())
        agent.recover(after)
        assert set(agent.finish().values()) == {0}
        return bits(agent), agreed.step


@pytest.mark.parametrize("point", deaths.IN_A_STEP)
def test_a_death_at_any_point_of_a_step_leaves_all_with_the_same_bits(tmp_path: Path, point: str, planned: Any) -> None:
    found, step = survive(tmp_path, "plain", "DP4", "DP3", 3, point)
    if point != "in the vote":
        assert step == FATAL_STEP + (point in ("after the vote", "in the optimizer"))
    expected = planned("plain", "DP4", "DP3", (0, 1, 2), step)
    # A worker that dies in the update of a step has not come to write it down.
    assert_same_bits(found, {key: value for key, value in expected.items() if key != (FATAL_STEP, 3)})


@pytest.mark.parametrize(
    ("model", "before", "after", "victim", "point"),
    [
        ("ddp", "DP4", "DP3", 3, "backward"), ("fsdp", "TP2DP2", "TP2", 3, "forward"),
        ("gpt", "PP2DP2", "PP2", 3, "backward"), ("gpt", "TP2DP2", "TP2", 3, "forward"),
    ],
)
def test_every_kind_of_parallelism_survives_a_death(
    tmp_path: Path, model: str, before: str, after: str, victim: int, point: str, planned: Any
) -> None:
    found, step = survive(tmp_path, model, before, after, victim, point)
    survivors = tuple(rank for rank in range(4) if rank != victim)[: ParallelConfig.parse(after).num_ranks]
    assert step == FATAL_STEP
    assert_same_bits(found, planned(model, before, after, survivors, step))
