"""What a step says about an error that has left the loop."""

from __future__ import annotations

import pytest

from etc_agent.errors import PeerLostError
from etc_agent.worker.step import Deciding, Step

LOST = PeerLostError("connection closed by peer")


DECIDING = Deciding(
    vote=lambda ok: ok, apply=lambda step, ok: None, publish=lambda: None, forgive=lambda error: False
)


def committed() -> Step:
    step = Step(DECIDING, 14)
    with step:
        step.commit()
    return step


def test_a_lost_connection_between_two_steps_is_told_where_collectives_belong() -> None:
    advice = committed().advice(LOST)
    assert "outside of `with step`, near step 14" in advice
    assert "session.guarded()" in advice


def test_an_error_of_the_script_or_of_the_step_itself_has_no_such_advice() -> None:
    assert not committed().advice(ValueError("a mistake"))
    step = Step(DECIDING, 14)
    with pytest.raises(PeerLostError), step:
        raise LOST
    assert not step.advice(LOST)


def test_what_an_update_publishes_comes_after_the_commit_so_that_a_loss_in_it_does_not_run_the_step_again() -> None:
    done = []

    def publish() -> None:
        done.append("publish")
        raise LOST

    step = Step(
        Deciding(lambda ok: ok, lambda step, ok: done.append("apply"), publish, forgive=lambda error: error is LOST), 14
    )
    with step:
        step.commit()
    assert done == ["apply", "publish"]
    assert step.is_committed
    assert not step.is_retried
