"""Who takes part in a change, under which number, and what each worker finds in its environment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etc_agent.control.environment import generation_variables
from etc_agent.errors import EtcError
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Placement, Slot
from etc_agent.worker.change.crew import Crew

A0, A1, B0, B1 = (Slot(node, index) for node in ("a", "b") for index in (0, 1))


def generation(number: int, config: str, placement: Placement) -> Generation:
    return Generation(number, ParallelConfig.parse(config), placement, "a:29500", previous=number - 1)


PREVIOUS = generation(4, "DP2", (A1, B0))
NEXT = generation(5, "PP3", (B1, B0, A0))


def test_previous_ranks_come_first_then_those_that_join_by_their_new_rank() -> None:
    crew = Crew.of(B0, NEXT, PREVIOUS)
    assert crew.slots == (A1, B0, B1, A0)
    assert (crew.num_workers, crew.leaving, crew.joining) == (4, (0,), (2, 3))
    assert (crew.nodes, crew.num_on_this_node) == ((0, 1, 1, 0), 2)


@pytest.mark.parametrize(
    ("slot", "numbers"), [(A1, (0, 0, None)), (B0, (1, 1, 1)), (B1, (2, None, 0)), (A0, (3, None, 2))]
)
def test_a_worker_knows_its_number_and_its_rank_before_and_after(slot: Slot, numbers: tuple) -> None:
    crew = Crew.of(slot, NEXT, PREVIOUS)
    assert (crew.worker, crew.old_rank, crew.new_rank) == numbers


def test_a_slot_in_neither_generation_is_refused() -> None:
    with pytest.raises(EtcError, match="slot c/0 is neither in generation 4 nor in 5"):
        Crew.of(Slot("c", 0), NEXT, PREVIOUS)


def test_the_environment_of_a_worker_follows_from_its_generation_and_slot() -> None:
    assert generation_variables(NEXT, A0) == {
        "RANK": "2", "ROLE_RANK": "2", "WORLD_SIZE": "3", "ROLE_WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500",
        "ETC_GENERATION": "5", "ETC_PARALLEL": "PP3TP1DP1",
    }


def test_lost_workers_take_no_part_and_a_new_one_in_the_slot_of_a_lost_one_joins() -> None:
    previous = generation(4, "DP3", (A0, A1, B0))
    following = replace(generation(5, "DP3", (A1, B0, A0)), lost=(A0,))
    crew = Crew.of(A0, following, previous)
    assert crew.slots == (A1, B0, A0)
    assert (crew.old_ranks, crew.next_ranks, crew.joining, crew.leaving) == ((1, 2, None), (0, 1, 2), (2,), ())
    assert (crew.old_rank, crew.new_rank, crew.has_old_rank(0)) == (None, 2, False)
