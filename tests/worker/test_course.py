"""What a worker tells about its steps."""

import time

import pytest

from etc_agent.worker.course import Course


def run_step(course: Course, clock: list[float], seconds: float) -> None:
    course.reach_safe_point()
    course.begin_step()
    clock[0] += seconds
    course.end_step()


def test_the_pace_is_the_mean_of_all_steps_since_it_was_last_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the last step's duration: steps that are told at intervals are mostly long ones, and the sum of the trained
    seconds would grow beyond the time that has passed."""
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    course = Course(began=clock[0], ended=clock[0])
    assert course.tell() == 0.0
    for seconds in (0.1, 0.1, 0.1, 0.9):
        run_step(course, clock, seconds)
    assert course.tell() == pytest.approx(0.3)
    assert course.tell() == pytest.approx(0.3), "no step since"
    run_step(course, clock, 0.5)
    assert course.tell() == pytest.approx(0.5)
