"""A slot that a worker has just left is asked for again."""

from __future__ import annotations

import pytest

from etc_agent.control.messages import Prepare
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.records import Current, Phase
from etc_agent.reconfig.known.worker_view import WorkerView
from etc_agent.reconfig.member import Expect, Start, Tell, owed

SLOTS = (Slot("a", 0), Slot("a", 1))
GENERATIONS = {
    1: Generation(1, ParallelConfig(dp=2), SLOTS, "", 0),
    2: Generation(2, ParallelConfig(), SLOTS[:1], "", 1),
    3: Generation(3, ParallelConfig(dp=2), SLOTS, "", 2),
}
CURRENT = Current(committed=2, proposed=3, phase=Phase.PROPOSED, next_id=4)


def worker(index: int, started_for: int, exit_code: int | None = None) -> WorkerView:
    told = frozenset((kind, 2) for kind in ("prepare", "armed", "committed"))
    return WorkerView(index, started_for, in_session=True, exit_code=exit_code, told=told)


@pytest.mark.parametrize(("other", "action"), [(worker(1, 1), Expect), (worker(1, 1, exit_code=0), Start)])
def test_the_worker_that_still_ends_there_is_not_asked_to_join(other: WorkerView, action: type) -> None:
    actions = owed("a", CURRENT, GENERATIONS, {0: worker(0, 1), 1: other})
    told = [each.index for each in actions if isinstance(each, Tell) and isinstance(each.message, Prepare)]
    assert told == [0]
    assert [each.index for each in actions if isinstance(each, action)] == [1]


def test_the_one_that_is_started_for_it_is() -> None:
    actions = owed("a", CURRENT, GENERATIONS, {0: worker(0, 1), 1: worker(1, 3)})
    assert [each.index for each in actions if isinstance(each, Tell) and isinstance(each.message, Prepare)] == [0, 1]
