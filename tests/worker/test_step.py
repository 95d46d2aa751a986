"""What a step says about an error that has left the loop."""

from __future__ import annotations

import pytest

from etc_agent.errors import PeerLostError
from etc_agent.worker.step import Deciding, Step

LOST = PeerLostError("connection closed by peer")


def committed() -> Step:
    step = Step(Deciding(vote=lambda ok: ok, apply=lambda step, ok: None, forgive=lambda error: False), 14)
    with step:
        step.commit()
    return step


def test_a_lost_connection_between_two_steps_is_told_where_collectives_belong() -> None:
    advice = committed().advice(LOST)
    assert "outside of `with step`, near step 14" in advice
    assert "after step.commit() for an evaluation" in advice


def test_an_error_of_the_script_or_of_the_step_itself_has_no_such_advice() -> None:
    assert not committed().advice(ValueError("a mistake"))
    step = Step(Deciding(vote=lambda ok: ok, apply=lambda step, ok: None, forgive=lambda error: False), 14)
    with pytest.raises(PeerLostError), step:
        raise LOST
    assert not step.advice(LOST)
