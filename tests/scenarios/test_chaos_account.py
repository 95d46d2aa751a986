"""scripts/chaos.py finds what is wrong in a job's account of itself."""

from __future__ import annotations

from dataclasses import replace

from chaos.lineage import Findings, Line, examine

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot

BATCH = 4


def generation(number: int, previous: int) -> Generation:
    return Generation(number, ParallelConfig(dp=2), (Slot("a", 0), Slot("b", 0)), "a:1", previous)


def step(index: int, number: int, at: float | None = None) -> list[Line]:
    """Step `index` as two ranks in generation `number` should tell of it."""
    time = 10.0 * number + index if at is None else at
    return [
        Line(
            index, number, "PP1TP1DP2", rank, rank, ids=(BATCH * index + 2 * rank, BATCH * index + 2 * rank + 1),
            loss=1.0, seen=(index + 1,), updates=(index + 1,), pid=10 * number + rank, time=time,
        )
        for rank in range(2)
    ]


def steps(indices: range, number: int) -> list[Line]:
    return [line for index in indices for line in step(index, number)]


def found(lines: list[Line], *previous: int) -> Findings:
    """`previous`: of generation 1, 2, ..."""
    return examine(lines, {n: generation(n, before) for n, before in enumerate(previous, 1)}, BATCH)


def test_a_change_in_place_and_a_restart_from_a_checkpoint_are_as_they_must_be() -> None:
    account = found(steps(range(5), 1) + steps(range(5, 9), 2) + steps(range(7, 12), 3), 0, 1, 0)
    assert account == Findings(num_steps=12, steps_repeated=2, lives=2)


def test_the_step_that_was_in_flight_when_a_life_ended_need_not_be_whole() -> None:
    assert not found([*steps(range(5), 1), step(5, 1)[0], *steps(range(5, 8), 2)], 0, 0).wrong


def test_a_change_in_place_that_repeats_or_skips_steps_is_found() -> None:
    for begin in (4, 6):
        account = found(steps(range(5), 1) + steps(range(begin, 9), 2), 0, 1)
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
