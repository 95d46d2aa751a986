"""A worker is killed in the middle of a change: what the others still have, what they say, and how they go on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from mini_agent import NODE, MiniAgent

from etc_agent.control.causes import ErrorKind
from etc_agent.control.messages import Armed, Prepared, Raised, Refused
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot


def slot(index: int) -> Slot:
    return Slot(NODE, index)


def prepared_for(agent: MiniAgent, config: str) -> tuple[Generation, list[Slot]]:
    generation, everyone = agent.prepare(config)
    for each in everyone:
        agent.hear(each, Prepared, generation=generation.id)
    return generation, everyone


def take_away(agent: MiniAgent, index: int) -> None:
    """The worker in that slot is killed, or kills itself as it was told to."""
    victim = agent.workers.pop(slot(index))
    agent.gone.append(victim)
    if "die_midway" not in agent.fault:
        victim.process.kill()
    victim.process.join(60)
    assert victim.process.exitcode == -9


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for file in folder.glob("steps-*.jsonl") for line in file.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["rank"] == 0}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The loss of each step of a job that nobody changes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with MiniAgent(folder, num_steps=200, pause_s=0.0, verify=False) as agent:
        agent.start("PP2")
        agent.finish()
    return losses(folder)


@pytest.mark.parametrize(
    "fault",
    [{"migration": "keep"}, {"migration": "keep", "die_midway": 2, "after": 0}, {"migration": "release"}],
    ids=["keep, before", "keep, midway", "release, before its vote"],
)
def test_a_killed_joiner_costs_the_others_nothing(
    tmp_path: Path, fault: dict, undisturbed: dict[int, float]
) -> None:
    with MiniAgent(tmp_path, pause_s=0.02, fault=fault) as agent:
        agent.start("PP2")
        generation, everyone = prepared_for(agent, "PP3")
        if "die_midway" not in fault:
            take_away(agent, 2)
        for each in everyone:
            if each in agent.workers:
                agent.send(each, Armed(generation.id))
        if "die_midway" in fault:
            take_away(agent, 2)
        for each in everyone[:2]:
            assert agent.hear(each, Refused, generation=generation.id).error
        agent.change("PP2", (slot(1), slot(0)))
        agent.first_steps()
        last = agent.last_step_in(5)
        assert set(agent.finish().values()) == {0}
        logs = agent.logs()
        assert "release mode had begun" not in logs
        reason = "every worker" if fault["migration"] == "keep" else "worker 0"
        told = rf"generation 3 was migrated to in {fault['migration']} mode, since {reason} asks for it: "
        assert len(re.findall(told + r"[1-9][\d,]* bytes moved in \d+ ms", logs)) == 1
        assert {line["generation"] for line in agent.steps()} == {1, 3}
    seen = losses(tmp_path)
    assert sorted(seen) == list(range(last + 1))
    assert seen == {step: undisturbed[step] for step in seen}, "bit for bit"


def test_a_killed_worker_of_the_old_generation_is_named_and_the_rest_hold_its_state_whole(tmp_path: Path) -> None:
    fault = {"migration": "keep", "die_midway": 1, "after": 0, "loss_timeout_s": 1.0}
    with MiniAgent(tmp_path, pause_s=0.02, fault=fault) as agent:
        agent.start("PP3")
        generation, everyone = prepared_for(agent, "TP3")
        for each in everyone:
            agent.send(each, Armed(generation.id))
        take_away(agent, 1)
        assert set(agent.finish().values()) == {1}
        logs = agent.logs()
        survivors = list(agent.workers.values())
    for worker in (0, 2):
        assert re.search(rf"worker {worker}: round 0: receiving '\S+' \[.*\].* from worker \d failed", logs), logs
    assert re.search(r"worker [02]: round 0: receiving '\S+' \[.*\].* from worker 1 failed", logs)
    assert "SwitchError: the switch to generation 2 broke off before its vote: worker" in logs
    raised = [message.kind for worker in survivors for message in worker.heard if isinstance(message, Raised)]
    assert set(raised) <= {ErrorKind.PEER_LOST}
    for rank in (0, 2):
        before = shards(tmp_path / "verify" / f"gen2-old-rank{rank}.npz")
        left = shards(tmp_path / f"gen1-left-rank{rank}.npz")
        assert left
        assert all(np.array_equal(part, before[key]) for key, part in left.items())


def shards(path: Path) -> dict[tuple[str, tuple[int, ...]], np.ndarray]:
    with np.load(path) as file:
        index = json.loads(file["index"].tobytes())
        return {(entry["name"], tuple(entry["offset"])): file[f"b{i}"] for i, entry in enumerate(index)}
