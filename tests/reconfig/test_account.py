"""The job's account over its history, and its goodput."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etc_agent.parallel.generation import Trigger
from etc_agent.reconfig.known.records import History
from etc_agent.reconfig.past.account import BOUNDS_S, Account, Distribution
from etc_agent.reconfig.past.goodput import Goodput

RECORDS = st.builds(
    History,
    generation=st.integers(1, 99),
    config=st.just("DP2"),
    previous=st.integers(0, 3),
    reason=st.just("for people"),
    outcome=st.sampled_from(["committed", "withdrawn"]),
    moved_bytes=st.integers(0, 1 << 40),
    stop_ms=st.none() | st.integers(0, 1 << 20).map(float),
    phases_ms=st.dictionaries(st.sampled_from(["migrate", "vote"]), st.integers(0, 1 << 10).map(float)),
    prepare_ms=st.dictionaries(st.sampled_from(["build", "plan"]), st.integers(0, 1 << 10).map(float)),
    trigger=st.sampled_from(Trigger),
)


def same(one: Account, other: Account) -> bool:
    """Equal, up to the order in which floating point sums were made."""
    return all(
        a == pytest.approx(b) if isinstance(a, int | float) else a == b
        for a, b in zip(_flat(one), _flat(other), strict=True)
    )


def _flat(account: Account) -> list[object]:
    found: list[object] = [sorted(account.changes.items()), sorted(account.restarts.items()), account.moved_bytes]
    for name, durations in [("", account.stops), ("", account.recoveries), *sorted(account.phases.items())]:
        found += [name, durations.counts, durations.sum_s]
    return found


@given(st.lists(RECORDS), st.lists(RECORDS))
def test_what_is_removed_from_the_history_stays_in_the_account(removed: list[History], kept: list[History]) -> None:
    stored = Account.from_json(json.loads(json.dumps(Account.of(removed).to_json())))
    assert same(stored + Account.of(kept), Account.of([*removed, *kept]))


def test_durations_are_counted_as_prometheus_counts_them() -> None:
    durations = Distribution.of([0.1, 0.11, 1e6])
    by_bound = dict(durations.cumulative)
    assert by_bound[0.05] == 0
    assert by_bound[0.1] == 1, "the bound itself is included"
    assert by_bound[0.25] == by_bound[BOUNDS_S[-1]] == 2
    assert by_bound[float("inf")] == durations.count == 3


def test_the_start_of_the_job_is_no_restart_and_a_change_in_place_is_none_either() -> None:
    first = History(1, "DP2", 0, "start", "committed")
    grown = replace(first, generation=2, previous=1, trigger=Trigger.NODES_CAME)
    lost = replace(first, generation=3, trigger=Trigger.NODE_LOST)
    assert Account.of([first, grown, lost]).restarts == {"node_lost": 1}


def test_a_recovery_in_place_is_no_planned_stop() -> None:
    planned = History(2, "DP2", 1, "asked", "committed", stop_ms=50.0, trigger=Trigger.REQUEST)
    killed = replace(planned, generation=3, stop_ms=700.0, trigger=Trigger.WORKER_KILLED)
    refused = replace(killed, generation=4, stop_ms=None, outcome="withdrawn")
    account = Account.of([planned, killed, refused])
    assert (account.stops.sum_s, account.recoveries.sum_s) == (0.05, 0.7)
    assert account.losses == {"worker_killed": 1}


def test_steps_count_once_and_a_new_leader_goes_on_from_what_the_one_before_wrote() -> None:
    goodput = Goodput(since=100.0).at(100.0, 1, 40, 1.0)
    assert goodput.trained_s == 0.0, "a job that starts at step 40 has not trained 40 steps"
    goodput = goodput.at(110.0, 1, 45, 1.0)
    goodput = Goodput.from_json(json.loads(json.dumps(goodput.to_json())))
    assert goodput.at(130.0, 2, 42, 1.0).trained_s == 5.0, "after a restart from step 40"
    again = goodput.at(130.0, 2, 42, 1.0).at(135.0, 2, 43, 1.0).at(140.0, 2, 47, 2.0)
    assert (again.trained_s, again.life_s(140.0)) == (9.0, 40.0)
    assert again.redone == 3


def test_a_new_leader_whose_worker_told_its_step_earlier_has_not_gone_back() -> None:
    goodput = Goodput(since=100.0).at(100.0, 1, 40, 1.0).at(110.0, 1, 45, 1.0)
    assert goodput.at(111.0, 1, 42, 1.0) == goodput
    later = goodput.at(120.0, 2, 47, 1.0).at(121.0, 1, 46, 1.0)
    assert (later.redone, later.trained_s) == (0, 7.0)


def test_no_job_trains_for_longer_than_it_lives() -> None:
    goodput = Goodput(since=100.0).at(100.0, 1, 0, 1.0).at(103.0, 1, 10, 7.0)
    assert goodput.trained_s == 3.0
    assert goodput.at(90.0, 1, 11, 1.0).trained_s == 3.0, "another node's clock is behind"
    assert goodput.life_s(90.0) == 3.0
