"""Old records go; those that a decision or a worker still needs stay."""

from __future__ import annotations

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.parts import base_of
from etc_agent.reconfig.known.records import Current
from etc_agent.reconfig.past.tidy import KEPT, Outdated, outdated


def line(first: int, last: int) -> dict[int, Generation]:
    """Generations `first` to `last` of one life."""
    slots = (Slot("a", 0),)
    return {
        number: Generation(number, ParallelConfig(), slots, "a:1", previous=number - 1 if number > first else 0)
        for number in range(first, last + 1)
    }


def current(generations: dict[int, Generation]) -> Current:
    return Current(committed=max(generations), next_id=max(generations) + 1)


def test_a_short_job_keeps_every_generation_and_the_acknowledgements_that_count() -> None:
    generations = line(1, 5)
    assert outdated(current(generations), generations, range(1, 6)) == Outdated(acks=(2, 3))


def test_the_fresh_generation_of_a_long_life_stays_when_those_after_it_go() -> None:
    generations = line(1, KEPT + 5)
    found = outdated(current(generations), generations, [1, KEPT + 4, KEPT + 5])
    assert found == Outdated(generations=(2, 3, 4, 5))
    left = {number: generation for number, generation in generations.items() if number not in found.generations}
    assert base_of(left[KEPT + 5], left) == 1


def test_the_generations_of_an_earlier_life_go_whole() -> None:
    generations = line(1, 3) | line(4, KEPT + 6)
    assert outdated(current(generations), generations, [1, 4]).generations == (1, 2, 3, 5, 6)


def test_what_is_left_over_goes_a_little_at_a_time() -> None:
    generations = line(1, 3 * KEPT)
    num_removed = 0
    while (found := outdated(current(generations), generations, ())).generations:
        assert len(found.generations) <= 20
        num_removed += len(found.generations)
        generations = {number: item for number, item in generations.items() if number not in found.generations}
    assert len(generations) == KEPT + 1
    assert num_removed == 2 * KEPT - 1
