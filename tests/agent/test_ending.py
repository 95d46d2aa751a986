"""With which exit code an agent ends, and when."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from etc_agent.agent.ending import End, Ending, Facts, end_of
from etc_agent.agent.settings import Timeouts
from etc_agent.reconfig.known.records import Current, Outcome

TIMEOUTS = Timeouts(end_s=30.0, join_s=900.0)
TRAINING = Facts(Current(committed=1), is_member=True)
TERM = (signal.SIGTERM,)


def ended(outcome: Outcome, exit_code: int) -> Current:
    return Current(committed=1, outcome=outcome, exit_code=exit_code, why="the reason")


@pytest.mark.parametrize(
    ("facts", "exit_code"),
    [
        (TRAINING, None),
        (replace(TRAINING, current=ended(Outcome.SUCCEEDED, 0)), 0),
        (replace(TRAINING, current=ended(Outcome.SUCCEEDED, 0), signals=TERM, is_told_to_leave=True), 0),
        (replace(TRAINING, current=ended(Outcome.FAILED, 42)), 42),
        (replace(TRAINING, current=ended(Outcome.STOPPED, 143)), 143),
        (replace(TRAINING, current=ended(Outcome.STOPPED, 143), signals=(signal.SIGINT,)), 130),
        (replace(TRAINING, is_stopping=True, signals=(signal.SIGINT, signal.SIGTERM)), 143),
        (replace(TRAINING, is_stopping=True), 1),
        (replace(TRAINING, is_stopping=True, has_finished=True, signals=TERM), 0),
        (replace(TRAINING, is_told_to_leave=True), None),
        (replace(TRAINING, is_told_to_leave=True, is_member=False), 0),
        (Facts(Current(), is_told_to_leave=True, is_alone=True), None),
        (Facts(Current(), is_told_to_leave=True), 0),
    ],
)
def test_an_agent_ends_with_the_exit_code_of_its_part_in_the_job(facts: Facts, exit_code: int | None) -> None:
    end = end_of(facts, TIMEOUTS)
    assert (end and end.exit_code) == exit_code


@pytest.mark.parametrize(
    ("facts", "exit_code"),
    [
        (replace(TRAINING, has_finished=True, unheard_s=29.0), None),
        (replace(TRAINING, has_finished=True, unheard_s=30.0), 0),
        (replace(TRAINING, has_finished=True, unheard_s=1.0, is_told_to_leave=True, signals=TERM), 0),
        (replace(TRAINING, unheard_s=899.0), None),
        (replace(TRAINING, unheard_s=900.0), 1),
        (replace(TRAINING, unheard_s=900.0, failed_with=137), 137),
        (Facts(Current(committed=1), unheard_s=900.0), 1),
    ],
)
def test_without_etcd_it_ends_in_a_stated_time_and_with_0_where_all_its_workers_have_finished(
    facts: Facts, exit_code: int | None
) -> None:
    end = end_of(facts, TIMEOUTS)
    assert (end and end.exit_code) == exit_code
    assert end is None or ("etcd has not answered" in end.why and "timeouts." in end.why)


def test_how_the_job_failed_is_said_once_by_its_leader_and_by_every_other_node() -> None:
    failed = replace(TRAINING, current=ended(Outcome.FAILED, 1))
    assert end_of(replace(failed, is_leader=True), TIMEOUTS) == End(1, Ending.FAILED)
    other = end_of(failed, TIMEOUTS)
    assert other is not None
    assert other.why == "the job failed: the reason"
