"""What etcd refuses is tried again ever more seldom, and told once."""

from __future__ import annotations

from etc_agent.rendezvous.attempts import Attempts
from etc_agent.rendezvous.etcd.errors import EtcdError, EtcdUnavailable

FULL = EtcdError("etcd is full")


def test_a_refusal_is_tried_again_after_twice_the_time_up_to_the_longest() -> None:
    attempts, now, waits = Attempts(first_s=0.5, longest_s=4.0), 100.0, []
    for _ in range(6):
        attempts.failed(now, FULL)
        waits.append(next(wait for wait in (0.5, 1.0, 2.0, 4.0) if attempts.are_due(now + wait)))
        assert not attempts.are_due(now + waits[-1] - 0.01)
        now += waits[-1]
    assert waits == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_reason_is_told_once_until_it_changes_or_is_gone() -> None:
    attempts = Attempts()
    assert [attempts.failed(0.0, FULL) for _ in range(3)] == [True, False, False]
    assert attempts.failed(0.0, EtcdError("etcd does not let us"))
    assert attempts.failed(0.0, FULL)
    assert attempts.succeeded()
    assert not attempts.succeeded()
    assert attempts.are_due(0.0)
    assert attempts.failed(0.0, FULL)


def test_after_no_answer_there_is_no_wait() -> None:
    attempts = Attempts()
    attempts.failed(0.0, FULL)
    attempts.failed(1.0, EtcdUnavailable("no answer"))
    assert attempts.are_due(1.0)
