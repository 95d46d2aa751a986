"""A script gives its tensors other memory between the preparation of a change and the switch."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from mini_agent import NODE, MiniAgent

sys.path.insert(0, str(Path(__file__).parents[1]))
from oracle import assert_same_bits, gathered

from etc_agent.control.messages import Armed, Prepared, Refused
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot

FAULT = {"migration": "keep"}
STAY = tuple(Slot(NODE, index) for index in (0, 2, 1, 3))
"""Placement of PP2DP2 in which both stages stay where they are in PP2."""


def prepared_and_rebound(agent: MiniAgent, kinds: str) -> tuple[Generation, list[Slot]]:
    back = str(agent.generation and agent.generation.config) == "PP2TP1DP2"
    generation, everyone = agent.prepare("PP2" if back else "PP2DP2", STAY[::2] if back else STAY)
    for each in everyone:
        answer = agent.hear(each, Prepared, Refused, generation=generation.id)
        assert isinstance(answer, Prepared), answer
    agent.rebind(kinds)
    return generation, everyone


def losses(folder: Path) -> dict[int, set[float]]:
    lines = [json.loads(line) for file in folder.glob("steps-*.jsonl") for line in file.read_text().splitlines()]
    return {step: {line["loss"] for line in lines if line["step"] == step} for step in {x["step"] for x in lines}}


def test_the_values_that_tensors_have_at_the_switch_move(tmp_path: Path) -> None:
    kinds = ("exchange_weights", "exchange_moments", "load_moments", "new_memory", "new_parameter", "freeze")
    with MiniAgent(tmp_path, pause_s=0.02, fault=FAULT) as agent:
        agent.start("PP2")
        for kind in kinds:
            assert agent.generation is not None
            before = agent.generation.config
            generation, everyone = prepared_and_rebound(agent, kind)
            agent.commit(generation, everyone)
            agent.first_steps()
            old = gathered(agent.dump_dir, generation.id, "old", before.num_ranks)
            new = gathered(agent.dump_dir, generation.id, "new", generation.config.num_ranks)
            assert_same_bits(old, new)
        agent.last_step_in(3)
        assert set(agent.finish().values()) == {0}


def test_in_release_mode_the_present_values_move_too(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02, fault={"migration": "release"}) as agent:
        agent.start("PP2")
        generation, everyone = prepared_and_rebound(agent, "exchange_weights load_moments exchange_moments new_memory")
        agent.commit(generation, everyone)
        agent.first_steps()
        old, new = (gathered(agent.dump_dir, generation.id, side, ranks) for side, ranks in (("old", 2), ("new", 4)))
        assert_same_bits(old, new)
        agent.last_step_in(3)
        assert set(agent.finish().values()) == {0}


@pytest.mark.long
def test_a_change_that_is_voted_down_leaves_every_bit_of_the_old_generation(tmp_path: Path) -> None:
    """Judged by a job that is not changed, and does the same to its tensors after the same step."""
    changed, alone = tmp_path / "changed", tmp_path / "alone"
    changed.mkdir()
    alone.mkdir()
    with MiniAgent(changed, pause_s=0.02, fault=FAULT | {"forget_scheduler": [2, 3]}) as agent:
        agent.start("PP2")
        generation, everyone = prepared_and_rebound(agent, "exchange_weights load_moments exchange_moments new_memory")
        for each in everyone:
            agent.send(each, Armed(generation.id))
        for each in everyone[:2]:
            assert agent.hear(each, Refused, generation=generation.id).error
        last = agent.last_step_in(5)
        for each in everyone[2:]:
            agent.gone.append(agent.workers.pop(each))
        assert set(agent.finish().values()) == {0}
        assert "generation 2 was not entered" in agent.logs()
    (rebound,) = changed.glob("rebind-*")
    shutil.copy(rebound, alone)
    with MiniAgent(alone, num_steps=last + 1, pause_s=0.0, verify=False, fault=FAULT) as agent:
        agent.start("PP2")
        assert set(agent.finish().values()) == {0}
    assert losses(changed) == losses(alone), "bit for bit"


def test_a_tensor_that_has_come_since_is_refused_by_name_and_the_job_trains_on(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02, fault=FAULT) as agent:
        agent.start("PP2")
        generation, everyone = prepared_and_rebound(agent, "new_buffer")
        for each in everyone:
            agent.send(each, Armed(generation.id))
        told = {agent.hear(each, Refused, generation=generation.id).error for each in everyone[:2]}
        assert {error.partition(":")[0] for error in told} == {"model.layers.0.late", "model.layers.2.late"}
        for each in everyone[2:]:
            agent.gone.append(agent.workers.pop(each))
        agent.last_step_in(3)
        assert set(agent.finish().values()) == {0}
