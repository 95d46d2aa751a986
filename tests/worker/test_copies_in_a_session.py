"""Copies of the state beside training and across changes of size, in real processes."""

from __future__ import annotations

from pathlib import Path

from mini_agent import MiniAgent

from etc_agent.control.messages import Progress
from etc_agent.control.redundancy import REDUNDANCY_VARIABLE
from etc_agent.parallel.topology import Slot


def test_every_generation_makes_copies_of_its_own(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02, environment={REDUNDANCY_VARIABLE: "peer:3"}) as agent:
        agent.start("PP2")
        for config in ("PP4", "PP2"):
            _await_copies(agent)
            agent.change(config)
            agent.first_steps()
        _await_copies(agent)
        agent.last_step_in(5)
        assert set(agent.finish().values()) == {0}
        assert agent.logs().count("copies of the state are made every 3 steps") == 3
        assert "Traceback" not in agent.logs()


def _await_copies(agent: MiniAgent) -> None:
    """Until every worker has completed a copy set of the present generation."""
    generation = agent.generation
    assert generation is not None

    def has_copied(slot: Slot) -> bool:
        heard = [each for each in agent.workers[slot].heard if isinstance(each, Progress)]
        return any(each.copied >= 0 for each in heard if each.generation == generation.id)

    agent.wait_for(lambda: all(map(has_copied, generation.placement)), "copies")
