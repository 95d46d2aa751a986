"""State without a replica is lost with its worker: all go back to a copy set, and train on bit for bit the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from injected_job import Death
from mini_agent import NODE, MiniAgent
from replay import Line, differences, legs_of, lines_of, replay

from etc_agent.control.messages import Progress
from etc_agent.control.redundancy import REDUNDANCY_VARIABLE
from etc_agent.parallel.topology import Slot

AHEAD = 12
"""Steps between the moment in which a death is written down and the one in which it happens."""


def slot(index: int) -> Slot:
    return Slot(NODE, index)


def job_with_copies(folder: Path, model: str) -> MiniAgent:
    folder.mkdir()
    return MiniAgent(
        folder, pause_s=0.02, verify=False, job="injected_job", fault={"model": model},
        environment={REDUNDANCY_VARIABLE: "peer:3"},
    )


def await_copies(agent: MiniAgent) -> None:
    """Until every worker has completed a copy set of the present generation."""
    assert agent.generation is not None
    id_ = agent.generation.id

    def has_copied(each: Slot) -> bool:
        heard = [said for said in agent.workers[each].heard if isinstance(said, Progress)]
        return any(said.generation == id_ and said.copied >= 0 for said in heard)

    agent.wait_for(lambda: all(map(has_copied, agent.workers)), "copies")


def die(agent: MiniAgent, death: Death) -> None:
    """Have it happen some steps from now, and wait until it has."""
    assert isinstance(death.who, int)
    death.write(agent.directory, agent.steps()[-1]["step"] + AHEAD)
    assert agent.generation is not None
    agent.await_death(agent.generation.placement[death.who])


def applied(lines: list[Line], going_back_to: list[int]) -> list[Line]:
    """What counts in the end. Generation 1 + i is left at step ``going_back_to[i]``: later steps of it ran in vain."""
    ends = dict(enumerate(going_back_to, 1))
    return [line for line in lines if line["step"] < ends.get(line["generation"], line["step"] + 1)]


@pytest.mark.parametrize(
    ("model", "start", "after", "placement", "death"),
    [
        ("gpt", "PP2", "PP2", (0, 2), Death(1, "backward")),
        ("gpt", "PP2TP2", "PP3", (1, 2, 3), Death(0, "in_optimizer")),
        ("fsdp", "DP3", "DP2", (0, 2), Death(1, "forward")),
    ],
)
def test_all_ranks_go_back_to_one_step_and_train_on_as_if_nothing_had_happened(
    tmp_path: Path, model: str, start: str, after: str, placement: tuple[int, ...], death: Death
) -> None:
    with job_with_copies(tmp_path / "job", model) as agent:
        agent.start(start)
        await_copies(agent)
        die(agent, death)
        died = agent.steps()[-1]["step"]
        agreed = agent.agree_on_copies(agent.freeze())
        agent.recover(after, tuple(map(slot, placement)))
        last = agent.last_step_in(15)
        assert set(agent.finish().values()) == {0}
        found = lines_of(agent.directory)
    assert agreed.step <= died
    lines = applied(found, [agreed.step])
    assert {line["step"] for line in lines} == set(range(last + 1))
    undisturbed = replay(tmp_path / "replay", legs_of(lines), last, {"model": model})
    assert differences(lines, undisturbed, set()) == []
