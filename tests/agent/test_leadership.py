"""What a leader makes of its workers' answers."""

from __future__ import annotations

import pytest

from etc_agent.agent.leadership import Leadership
from etc_agent.control.causes import ErrorKind
from etc_agent.control.messages import Describe, Described
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.observing import JobRecords
from etc_agent.reconfig.known.records import Current
from etc_agent.reconfig.known.view import Policy, View

DP1 = ParallelConfig()


def leadership(retry_s: float = 60.0) -> Leadership:
    """One that reads answers only, and needs neither etcd nor workers for that."""
    return Leadership("a", Policy(1, 1, num_slots=1, retry_s=retry_s), None, None, None)  # type: ignore[arg-type]


def seen(leadership: Leadership) -> View:
    return leadership.observe(JobRecords(), connected_s=1e9, alive_at={})


@pytest.mark.parametrize(
    "answer",
    [
        Described("rubbish", None, "no"),
        Described("DP1", {}),
        Described("DP1", {"tensors": 3, "ranks": 4}),
        Described("DP1", {"tensors": [["w"]], "ranks": [[["w", 7]]]}),
        Described("DP1", {"tensors": [], "ranks": [[1]]}),
    ],
    ids=["no config", "empty", "numbers", "short rows", "no such tensor"],
)
def test_an_answer_that_cannot_be_read_is_left_out(answer: Described) -> None:
    leader = leadership()
    leader.learn(answer)
    assert seen(leader).descriptions == {}


def test_the_models_own_refusal_holds_and_any_other_error_does_for_a_while() -> None:
    leader = leadership()
    leader.learn(Described("DP1", None, "MemoryError", ErrorKind.RAISED))
    assert seen(leader).undescribed == {DP1: "MemoryError"}
    assert seen(leader).descriptions == {}
    leader.learn(Described("DP1", None, "4 heads", ErrorKind.MODEL))
    assert seen(leader).descriptions == {DP1: "4 heads"}
    leader = leadership(retry_s=0.0)
    leader.learn(Described("DP1", None, "MemoryError", ErrorKind.RAISED))
    assert seen(leader).undescribed == {}


class Asked:
    """Workers that note what they are asked, and never answer."""

    def __init__(self) -> None:
        self.configs: list[str] = []

    def ask(self, message: Describe, members: frozenset[int]) -> bool:
        self.configs.append(message.config)
        return True


def test_a_question_is_asked_again_at_once_when_workers_are_lost() -> None:
    workers = Asked()
    leader = Leadership("a", Policy(1, 1, num_slots=1), None, None, workers)  # type: ignore[arg-type]
    generation = Generation(1, DP1, (Slot("a", 0),), "a:1", previous=0)

    def ask(losses: int) -> None:
        leader._ask(DP1, JobRecords(current=Current(committed=1, losses=losses), generations={1: generation}))

    for losses in (0, 0, 1, 1):
        ask(losses)
    assert workers.configs == [str(DP1)] * 2
