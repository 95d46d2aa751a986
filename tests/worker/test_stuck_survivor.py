"""A survivor that does not come free of an operation with other workers ends itself; the others go on without it."""

from __future__ import annotations

import itertools
from pathlib import Path

from mini_agent import NODE, MiniAgent

from etc_agent.control.messages import Position
from etc_agent.parallel.topology import Slot
from etc_agent.worker.loss.stuck import Stuck

IN_A_COLLECTIVE = Position(1, 5, Position.STEP, True, "train.py:7")
COMPUTING = Position(1, 5, Position.STEP, False, "train.py:8")


def looks(positions: list[Position], busy: float) -> list[bool]:
    """What is seen every second, while the process uses `busy` CPU seconds in each, with a limit of 3 seconds."""
    clock = iter(range(1000))
    cpu = itertools.count(0, busy)
    at = iter(positions)
    stuck = Stuck(lambda: next(at), 3.0, lambda: float(next(clock)), lambda: float(next(cpu)))
    return [stuck.look() for _ in positions]


def test_only_a_process_that_waits_in_a_collective_and_computes_nothing_is_stuck() -> None:
    assert looks([IN_A_COLLECTIVE] * 4, 0.0) == [False, False, True, True]
    assert looks([IN_A_COLLECTIVE] * 20, 0.9) == [False] * 20, "a long backward pass"
    assert looks([COMPUTING] * 20, 0.0) == [False] * 20, "it waits for a disk, or for the script's own reasons"
    assert looks([IN_A_COLLECTIVE, COMPUTING, IN_A_COLLECTIVE, IN_A_COLLECTIVE], 0.0) == [False] * 4


def test_the_others_go_on_without_a_survivor_that_cannot_be_freed(tmp_path: Path) -> None:
    fault = {"model": "even", "die": "backward", "slot": 3, "at": 6, "uncut": 1, "abort_timeout_s": 1.0}
    with MiniAgent(tmp_path, num_steps=11, job="mortal_job", fault=fault, verify=False, pause_s=0) as agent:
        agent.start("DP4")
        agent.await_death(Slot(NODE, 3))
        agent.agree(agent.freeze())
        agent.await_death(Slot(NODE, 1))
        assert "this worker ends itself, so that the others can go on without it" in agent.logs()
        agent.agree(agent.freeze())
        agent.recover("DP2")
        assert set(agent.finish().values()) == {0}
        assert {line["step"] for line in agent.steps()} == set(range(11))
