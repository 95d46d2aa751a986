"""A model that refuses the config that a job was to start with."""

from __future__ import annotations

from pathlib import Path

import pytest
from mini_agent import NODE, MiniAgent

from etc_agent.control.causes import ErrorKind
from etc_agent.control.messages import Refused
from etc_agent.parallel.topology import Slot


@pytest.mark.parametrize(
    ("config", "fault", "why"),
    [
        ("DP5", {}, "PP1TP1DP5: a global batch of 12 cannot be divided over dp=5; choose dp from 1, 2, 3, 4, 6, 12"),
        ("DP2", {"refusing_rank": 1}, "rank 1 has no data"),
    ],
    ids=["every rank", "one rank"],
)
def test_every_rank_says_why_and_answers_questions_until_it_is_stopped(
    config: str, fault: dict[str, object], why: str, tmp_path: Path
) -> None:
    with MiniAgent(tmp_path, fault=fault) as agent:
        agent.start(config)
        for slot in agent.workers:
            refused = agent.hear(slot, Refused, generation=1)
            assert refused.kind is ErrorKind.MODEL
            assert refused.error.startswith(why)
        assert agent.describe(Slot(NODE, 1), "TP5").kind is ErrorKind.MODEL
        assert agent.describe(Slot(NODE, 1), "PP2").layout is not None
        assert all(worker.process.is_alive() for worker in agent.workers.values())
