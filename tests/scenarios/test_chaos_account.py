"""scripts/chaos.py finds what is wrong in a job's account of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from chaos.lineage import Excuses, Findings, Line, examine

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot

BATCH = 4


LATER = 1e9
BOTH = {10: 1.0, 11: 1.0}
"""The workers of generation 1, killed before any later one began."""


def generation(number: int, previous: int) -> Generation:
    return Generation(number, ParallelConfig(dp=2), (Slot("a", 0), Slot("b", 0)), "a:1", previous)


def step(index: int, number: int, at: float | None = None, life: int | None = None) -> list[Line]:
    """Step `index` as two ranks in generation `number` should tell of it, whose processes began with that of `life`."""
    time = 10.0 * number + index if at is None else at
    return [
        Line(
            index, number, "PP1TP1DP2", rank, rank, ids=(BATCH * index + 2 * rank, BATCH * index + 2 * rank + 1),
            loss=1.0, seen=(index + 1,), updates=(index + 1,), pid=10 * (life or number) + rank, time=time,
        )
        for rank in range(2)
    ]


def steps(indices: range, number: int, life: int | None = None) -> list[Line]:
    return [line for index in indices for line in step(index, number, life=life)]


def found(lines: list[Line], *previous: int, deaths: dict[int, float] | None = None) -> Findings:
    """`previous`: of generation 1, 2, ..."""
    generations = {n: generation(n, before) for n, before in enumerate(previous, 1)}
    return examine(lines, generations, BATCH, Excuses(deaths or {}))


def test_a_change_in_place_and_a_restart_from_a_checkpoint_are_as_they_must_be() -> None:
    lines = steps(range(5), 1) + steps(range(5, 9), 2, life=1) + steps(range(7, 12), 3)
    account = found(lines, 0, 1, 0, deaths={10: 25.0, 11: 26.0})
    assert account == Findings(num_steps=12, steps_repeated=2, lives=2)


def test_the_step_that_was_in_flight_when_a_life_ended_need_not_be_whole() -> None:
    assert not found([*steps(range(5), 1), step(5, 1)[0], *steps(range(5, 8), 2)], 0, 0, deaths=BOTH).wrong


def test_a_change_in_place_that_repeats_or_skips_steps_is_found() -> None:
    for begin in (4, 6):
        account = found(steps(range(5), 1) + steps(range(begin, 9), 2, life=1), 0, 1)
        assert account.steps_lost_planned == 1
        assert any("generation 2 goes on with step" in line for line in account.wrong)


def test_a_restart_after_steps_that_nobody_did_is_found() -> None:
    assert any("begins with step 6" in line for line in found(steps(range(5), 1) + steps(range(6, 9), 2), 0, 0).wrong)


def test_two_lives_at_the_same_time_are_found() -> None:
    late = step(5, 1, at=100.0)
    assert any("ended up to" in line for line in found(steps(range(5), 1) + late + steps(range(3, 8), 2), 0, 0).wrong)


def test_a_missing_rank_wrong_samples_a_state_of_another_step_and_disagreement_are_found() -> None:
    good = steps(range(5), 1)
    spoilt = {
        "was done by ranks": good[:4] + good[5:],
        "trained on samples": [replace(line, ids=(0, 1)) if line.step == 2 else line for line in good],
        "has been through": [replace(line, seen=(line.step,)) if line.step == 2 else line for line in good],
        "disagree about its loss": [*good[:4], replace(good[4], loss=2.0), *good[5:]],
    }
    for what, lines in spoilt.items():
        (wrong,) = found(lines, 0).wrong
        assert what in wrong


@pytest.mark.parametrize(
    ("deaths", "is_needless"),
    [({10: 1.0}, True), ({11: 1.0}, True), (BOTH, False), ({10: 1.0, 11: LATER}, True), ({}, True)],
)
def test_a_restart_although_a_replica_was_alive_is_found(deaths: dict[int, float], is_needless: bool) -> None:
    account = found(steps(range(5), 1) + steps(range(3, 8), 2), 0, 0, deaths=deaths)
    assert account.needless_restarts == is_needless
    assert any("lived and held the whole state" in line for line in account.wrong) == is_needless


def test_a_survivor_in_another_process_is_found_and_a_victims_slot_may_have_a_new_one() -> None:
    moved = [replace(line, pid=line.pid + 100 * line.rank) for line in steps(range(5, 9), 2, life=1)]
    lines = steps(range(5), 1) + moved
    assert not found(lines, 0, 1, deaths={11: 14.0}).wrong
    (wrong,) = found(lines, 0, 1, deaths={10: 14.0}).wrong
    assert "pid 11 of generation 1 became 111 in 2" in wrong


def test_the_step_under_way_may_run_again_and_the_victim_alone_may_have_no_account_of_the_last_one() -> None:
    retried = [replace(line, is_retried=True) for line in step(5, 1)]
    lines = [*steps(range(4), 1), step(4, 1)[0], retried[0], *steps(range(5, 9), 2, life=1)]
    account = found(lines, 0, 1, deaths={11: 14.0})
    assert not account.wrong
    assert account.steps_redone == account.redone_max == 1
    (wrong,) = found(lines, 0, 1, deaths={10: 14.0}).wrong
    assert "was done by ranks [0]" in wrong


def test_two_steps_that_run_again_after_one_loss_are_found() -> None:
    again = [replace(step(index, 1)[0], is_retried=True) for index in (4, 5)]
    (wrong,) = found([*steps(range(5), 1), *again, *steps(range(5, 9), 2, life=1)], 0, 1, deaths={11: 14.0}).wrong
    assert "steps [4, 5] were all run again" in wrong


PIPELINE = ParallelConfig(pp=2)


def lines_of_pipeline(indices: range, number: int, pids: tuple[int, int]) -> list[Line]:
    samples = [tuple(range(BATCH * index, BATCH * index + BATCH)) for index in range(indices.stop)]
    return [
        Line(
            index, number, "PP2TP1DP1", rank, 0, samples[index], 1.0, (index + 1,), (index + 1,), pids[rank],
            time=100.0 * number + index,
        )
        for index in indices for rank in range(2)
    ]


def gone_back(begin: int, deaths: dict[int, float], copies_every: int = 3, *, anew: bool = False) -> Findings:
    """Of a pipeline that trained for 20 steps, lost a worker, and went on with step `begin`."""
    old = Generation(1, PIPELINE, (Slot("a", 0), Slot("b", 0)), "a:1", 0)
    new = replace(old, id=2, previous=0 if anew else 1, lost=() if anew else (Slot("b", 0),))
    pids = (12, 13) if anew else (10, 12)
    lines = lines_of_pipeline(range(20), 1, (10, 11)) + lines_of_pipeline(range(begin, 30), 2, pids)
    return examine(lines, {1: old, 2: new}, BATCH, Excuses(deaths, copies_every=copies_every))


def test_a_recovery_from_copies_may_go_back_and_what_it_goes_back_over_does_not_count() -> None:
    account = gone_back(15, {11: 120.0})
    assert not account.wrong
    assert (account.steps_gone_back, account.gone_back_max, account.num_steps) == (5, 5, 30)


def test_going_back_although_nobody_was_lost_or_no_copies_are_made_is_found() -> None:
    for account in (gone_back(15, {}), gone_back(15, {11: 120.0}, copies_every=0)):
        assert any("generation 2 goes on with step 15 after 19" in line for line in account.wrong)


def test_a_restart_although_copies_were_left_is_found() -> None:
    (wrong,) = gone_back(15, {11: 120.0}, anew=True).wrong
    assert "ranks [0] of generation 1, PP2TP1DP1, lived and held the whole state or copies of it" in wrong
    assert not gone_back(15, {10: 120.0, 11: 120.0}, anew=True).wrong
    assert not gone_back(15, {11: 120.0}, copies_every=10, anew=True).wrong


def test_a_restart_while_every_node_may_have_been_fenced_is_none_of_ours() -> None:
    lines = steps(range(5), 1) + steps(range(3, 8), 2)
    generations = {1: generation(1, 0), 2: generation(2, 0)}
    assert examine(lines, generations, BATCH, Excuses()).needless_restarts == 1
    assert examine(lines, generations, BATCH, Excuses(fenced=((20.0, 60.0),))).needless_restarts == 0
