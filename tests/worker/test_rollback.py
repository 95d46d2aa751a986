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


def job_with_copies(folder: Path, model: str, scheme: str = "peer", every: int = 3) -> MiniAgent:
    folder.mkdir()
    return MiniAgent(
        folder, pause_s=0.02, verify=False, job="injected_job", fault={"model": model},
        environment={REDUNDANCY_VARIABLE: f"{scheme}:{every}"},
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


def applied(lines: list[Line], back_to: int) -> list[Line]:
    """What counts in the end: later steps of generation 1 than `back_to` ran in vain."""
    return [line for line in lines if line["generation"] > 1 or line["step"] < back_to]


@pytest.mark.parametrize(
    ("scheme", "model", "start", "after", "placement", "death"),
    [
        ("peer", "gpt", "PP2", "PP2", (0, 2), Death(1, "backward")),
        pytest.param("peer", "gpt", "PP2TP2", "PP3", (1, 2, 3), Death(0, "in_optimizer"), marks=pytest.mark.long),
        ("peer", "fsdp", "DP3", "DP2", (0, 2), Death(1, "forward")),
        pytest.param("parity", "gpt", "PP3", "PP2", (0, 2), Death(1, "in_optimizer"), marks=pytest.mark.long),
        pytest.param("parity", "fsdp", "DP3", "DP2", (1, 2), Death(0, "forward"), marks=pytest.mark.long),
        pytest.param("parity", "gpt", "PP2TP2", "PP3", (0, 1, 2), Death(3, "backward"), marks=pytest.mark.long),
    ],
)
def test_all_ranks_go_back_to_one_step_and_train_on_as_if_nothing_had_happened(
    tmp_path: Path, scheme: str, model: str, start: str, after: str, placement: tuple[int, ...], death: Death
) -> None:
    with job_with_copies(tmp_path / "job", model, scheme) as agent:
        agent.start(start)
        await_copies(agent)
        die(agent, death)
        died = agent.steps()[-1]["step"]
        agreed = agent.agree_on_copies(agent.freeze())
        agent.recover(after, tuple(map(slot, placement)))
        assert agreed.step <= died + 1, "the set of the step under way may have been complete"
        ends_as_if_undisturbed(agent, agreed.step, tmp_path / "replay", model)


def ends_as_if_undisturbed(agent: MiniAgent, back_to: int, folder: Path, model: str) -> None:
    last = agent.last_step_in(15)
    assert set(agent.finish().values()) == {0}
    lines = applied(lines_of(agent.directory), back_to)
    assert {line["step"] for line in lines} == set(range(last + 1))
    assert differences(lines, replay(folder, legs_of(lines), last, {"model": model}), set()) == []


def test_a_worker_that_dies_while_it_sends_its_copy_leaves_the_set_before_it(tmp_path: Path) -> None:
    with job_with_copies(tmp_path / "job", "gpt", every=1) as agent:
        agent.start("PP3")
        await_copies(agent)
        Death(1, "half sent").write(agent.directory, "copies")
        agent.await_death(slot(1))
        frozen = agent.freeze()
        assert max(answer.step for answer in frozen.values()) > min(answer.copied for answer in frozen.values())
        agreed = agent.agree_on_copies(frozen)
        agent.recover("PP2")
        ends_as_if_undisturbed(agent, agreed.step, tmp_path / "replay", "gpt")


@pytest.mark.long
def test_another_loss_before_the_recovery_sends_all_back_again(tmp_path: Path) -> None:
    with job_with_copies(tmp_path / "job", "gpt") as agent:
        agent.start("PP2TP2")
        await_copies(agent)
        die(agent, Death(1, "before_vote"))
        agent.agree_on_copies(agent.freeze())
        agent.prepare("PP3", (slot(0), slot(2), slot(3)))
        # Each copy is with the next worker, so that of both lost ones there are some.
        agent.kill(slot(3))
        agreed = agent.agree_on_copies(agent.freeze())
        agent.recover("PP2")
        ends_as_if_undisturbed(agent, agreed.step, tmp_path / "replay", "gpt")
