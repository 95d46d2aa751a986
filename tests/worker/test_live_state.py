"""Live modules are looked at at safe points: what they hold in the middle of a step does not matter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from mini_agent import MiniAgent

sys.path.insert(0, str(Path(__file__).parents[1]))
from oracle import assert_same_bits, gathered

from etc_agent.parallel.config import ParallelConfig

SIZES = ("DP3", "DP2", "DP4", "DP1", "DP3", "DP4", "DP2")


@pytest.mark.parametrize(
    ("evaluates", "sizes"), [pytest.param(False, SIZES * 2, marks=pytest.mark.long), (True, SIZES)],
    ids=["training", "evaluating between steps"],
)
def test_an_fsdp2_job_changes_its_size_while_it_trains_without_one_refusal(
    tmp_path: Path, evaluates: bool, sizes: tuple[str, ...]
) -> None:
    with MiniAgent(tmp_path, pause_s=0.05, job="fsdp_job", fault={"evaluates": evaluates}) as agent:
        agent.start("DP2")
        previous = ParallelConfig(dp=2)
        for text in sizes:
            agent.change(text)
            assert agent.generation is not None
            number, current = agent.generation.id, ParallelConfig.parse(text)
            old = gathered(agent.dump_dir, number, "old", previous.num_ranks)
            new = gathered(agent.dump_dir, number, "new", current.num_ranks)
            assert any(name.endswith("exp_avg_sq") for name in old)
            assert_same_bits(old, new)
            previous = current
        agent.first_steps()
        agent.last_step_in(5)
        assert set(agent.finish().values()) == {0}
