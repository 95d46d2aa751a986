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

from etc_agent.control.causes import ErrorKind
from etc_agent.control.messages import Agreed, Armed, Prepared, Raised, Withdrawn
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
        ("ddp", "DP4", "DP3", 3, "backward"),
        pytest.param("fsdp", "TP2DP2", "TP2", 3, "forward", marks=pytest.mark.long),
        pytest.param("gpt", "PP2DP2", "PP2", 3, "backward", marks=pytest.mark.long),
        ("gpt", "TP2DP2", "TP2", 3, "forward"),
    ],
)
def test_every_kind_of_parallelism_survives_a_death(
    tmp_path: Path, model: str, before: str, after: str, victim: int, point: str, planned: Any
) -> None:
    found, step = survive(tmp_path, model, before, after, victim, point)
    survivors = tuple(rank for rank in range(4) if rank != victim)[: ParallelConfig.parse(after).num_ranks]
    assert step == FATAL_STEP
    assert_same_bits(found, planned(model, before, after, survivors, step))


def test_a_script_that_catches_the_errors_of_its_collectives_goes_on_with_the_same_bits(
    tmp_path: Path, planned: Any
) -> None:
    found, step = survive(tmp_path, "catching", "DP4", "DP3", 3, "backward")
    assert step == FATAL_STEP
    assert_same_bits(found, planned("catching", "DP4", "DP3", (0, 1, 2), step))


def test_an_evaluation_between_two_steps_survives_a_death_where_it_is_guarded(tmp_path: Path, planned: Any) -> None:
    fault = {"model": "even", "slot": 3, "evaluates_after": FATAL_STEP - 1}
    with MiniAgent(tmp_path, num_steps=NUM_STEPS, job="mortal_job", fault=fault, verify=False, pause_s=0) as agent:
        agent.start("DP4")
        agent.await_death(slot(3))
        assert agent.agree(agent.freeze()).step == FATAL_STEP
        agent.recover("DP3")
        assert set(agent.finish().values()) == {0}
        found = bits(agent)
    told = sorted(line for path in tmp_path.glob("evaluations-*") for line in path.read_text().splitlines())
    assert told.count(f"{FATAL_STEP - 1} False") == 3
    assert {line.split()[0] for line in told if line.endswith("True")} == {
        str(step) for step in range(NUM_STEPS) if step != FATAL_STEP - 1
    }
    expected = planned("even", "DP4", "DP3", (0, 1, 2), FATAL_STEP)
    assert_same_bits(found, {key: value for key, value in expected.items() if key != (FATAL_STEP - 1, 3)})


def grow_and_lose(agent: MiniAgent, point: str) -> Agreed:
    """From 3 workers to 4, in which the second one dies at that point of the switch."""
    agent.start("DP3")
    generation, everyone = agent.prepare("DP4")
    for each in everyone:
        agent.hear(each, Prepared, generation=generation.id)
    for each in everyone:
        agent.send(each, Armed(generation.id))
    agent.await_death(slot(1))
    agreed = agent.agree(agent.freeze(), generation)
    if agreed.generation == generation.id:
        agent.recover("DP3", (slot(0), slot(2), slot(3)))
    else:
        agent.send(slot(3), Withdrawn(generation.id, "a worker was lost"))
        agent.see_off(slot(3))
        agent.recover("DP2", (slot(0), slot(2)))
    assert set(agent.finish().values()) == {0}
    return agreed


@pytest.mark.parametrize(
    "point", ["in a switch, before its vote", "in a switch, in its vote", "in a switch, after its vote"]
)
def test_a_death_in_a_switch_leaves_all_in_the_same_generation(tmp_path: Path, point: str) -> None:
    fault = {"model": "even", "die": point, "slot": 1, "migration": "keep"}
    with MiniAgent(tmp_path, num_steps=60, job="mortal_job", fault=fault, verify=False, pause_s=0.01) as agent:
        agreed = grow_and_lose(agent, point)
        assert agreed.generation == (2 if point == "in a switch, after its vote" else 1)
        lines = agent.steps()
    assert sorted({line["step"] for line in lines}) == list(range(60))
    configs = {(line["step"] >= agreed.step, line["config"]) for line in lines}
    assert configs == {(False, "PP1TP1DP3"), (True, "PP1TP1DP3" if agreed.generation == 2 else "PP1TP1DP2")}


def test_a_death_after_a_release_switch_has_begun_is_said_to_break_the_state(tmp_path: Path) -> None:
    fault = {"model": "even", "die": "in a switch, before its vote", "slot": 1, "migration": "release"}
    with MiniAgent(tmp_path, job="mortal_job", fault=fault, verify=False, pause_s=0.01) as agent:
        agent.start("DP3")
        generation, everyone = agent.prepare("DP4")
        for each in everyone:
            agent.hear(each, Prepared, generation=generation.id)
        for each in everyone:
            agent.send(each, Armed(generation.id))
        agent.await_death(slot(1))
        frozen = agent.freeze()
    told = "workers were lost after the release switch to generation 2 had begun"
    assert {frozen[slot(index)].broken for index in (0, 2)} == {told}


def test_an_error_of_the_optimizer_is_the_job_s_failure_and_no_loss(tmp_path: Path) -> None:
    fault = {"model": "even", "raise_in_optimizer": FATAL_STEP, "slot": 1}
    with MiniAgent(tmp_path, job="mortal_job", fault=fault, verify=False, pause_s=0) as agent:
        agent.start("DP2")
        raised = agent.hear(slot(1), Raised)
        assert (raised.kind, raised.error) == (ErrorKind.RAISED, "RuntimeError: the update is wrong")
        agent.workers[slot(1)].process.join(60)
        assert agent.workers[slot(1)].process.exitcode == 1
        assert "the update is wrong" in agent.logs()


def test_more_losses_in_a_recovery_and_a_new_worker_in_the_slot_of_a_lost_one(tmp_path: Path) -> None:
    fault = {"model": "even"}
    with MiniAgent(tmp_path, job="mortal_job", fault=fault, verify=False, num_steps=60, pause_s=0.02) as agent:
        agent.start("DP4")
        agent.wait_for(lambda: len(agent.steps()) > 20, "some steps")
        agent.kill(slot(0))
        first = agent.agree(agent.freeze())
        generation, everyone = agent.prepare("DP3", (slot(1), slot(2), slot(3)))
        agent.hear(everyone[0], Prepared, generation=generation.id)
        agent.kill(slot(2))
        frozen = agent.freeze()
        assert {(answer.generation, answer.step) for answer in frozen.values()} == {(1, first.step)}
        agent.agree(frozen)
        agent.withdraw(generation, [each for each in everyone if each in agent.workers])
        agent.recover("DP4", (slot(1), slot(3), slot(0), slot(4)))
        assert set(agent.finish().values()) == {0}
        lines = agent.steps()
    assert sorted({line["step"] for line in lines}) == list(range(60))
    assert {(line["step"] >= first.step, line["generation"]) for line in lines} == {(False, 1), (True, 3)}


def test_a_worker_that_dies_after_the_last_step_takes_nobody_with_it(tmp_path: Path) -> None:
    fault = {"model": "even", "slot": 1, "die_after": NUM_STEPS - 1}
    with MiniAgent(tmp_path, num_steps=NUM_STEPS, job="mortal_job", fault=fault, verify=False, pause_s=0) as agent:
        agent.start("DP3")
        agent.await_death(slot(1))
        assert agent.agree(agent.freeze()).step == NUM_STEPS
        agent.recover("DP2")
        assert set(agent.finish().values()) == {0}
