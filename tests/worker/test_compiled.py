"""Compiled models over a change: survivors keep their graphs, no graph refers to a group that is gone, and workers that
join find what others have compiled."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
from mini_agent import NODE, MiniAgent

from etc_agent.parallel.topology import Slot


def lines(agent: MiniAgent, generation: int, local_rank: int) -> list[dict[str, Any]]:
    return [
        line for line in agent.steps() if (line["generation"], line["local_rank"]) == (generation, str(local_rank))
    ]


def see_steps(agent: MiniAgent, generation: int, *local_ranks: int) -> None:
    agent.wait_for(
        lambda: all(len(lines(agent, generation, worker)) > 2 for worker in local_ranks),
        f"steps of generation {generation}",
    )


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Step -> the loss of a job that is neither compiled nor changed."""

    @functools.cache
    def run(num_steps: int) -> dict[int, float]:
        with MiniAgent(
            tmp_path_factory.mktemp("unchanged"), job="compiled_job", num_steps=num_steps, verify=False, pause_s=0,
            fault={"backend": None},
        ) as agent:
            agent.start("DP1")
            agent.finish()
            return {line["step"]: line["loss"] for line in agent.steps()}

    return run


@pytest.mark.parametrize(
    ("fault", "configs", "keeps_graphs"),
    [
        ({}, ("DP1", "DP2", "DP1"), True),
        pytest.param({"in_place": True}, ("DP1", "DP2", "DP1"), True, marks=pytest.mark.long),
        pytest.param({"kind": "tp"}, ("TP2", "TP2DP2", "TP2"), False, marks=pytest.mark.long),
        pytest.param({"kind": "fsdp"}, ("DP2", "DP3", "DP2"), False, marks=pytest.mark.long),
    ], ids=["whole", "in place", "tensor parallel", "fully sharded"],
)
def test_compiled_models_train_on_over_changes(
    fault: dict[str, Any], configs: tuple[str, ...], keeps_graphs: bool, tmp_path: Path, unchanged: Any
) -> None:
    with MiniAgent(
        tmp_path, job="compiled_job", verify=False, pause_s=0.05, fault={"backend": "aot_eager", **fault}
    ) as agent:
        agent.start(configs[0])
        num_workers = len(agent.workers)
        see_steps(agent, 1, *range(num_workers))
        agent.change(configs[1])
        see_steps(agent, 2, 0, num_workers)
        agent.change(configs[2], tuple(Slot(NODE, index) for index in reversed(range(num_workers))))
        see_steps(agent, 3, *range(num_workers))
        last = agent.last_step_in(10)
        agent.finish()
        graphs = [lines(agent, generation, 0)[-1]["graphs"] for generation in (1, 2, 3)]
        losses = {line["step"]: line["loss"] for line in agent.steps()}
    expected = unchanged(1000)
    for step in range(last + 1):
        assert losses[step] == pytest.approx(expected[step], rel=1e-4), step
    assert graphs[0] > 0
    if keeps_graphs:
        assert graphs == [graphs[0]] * 3, "a survivor's graphs serve the next generation's model"


def test_graphs_of_earlier_generations_do_not_use_up_the_limit_of_recompilations(tmp_path: Path) -> None:
    fault = {"backend": "aot_eager", "kind": "tp", "recompile_limit": 2}
    with MiniAgent(tmp_path, job="compiled_job", verify=False, pause_s=0.01, fault=fault) as agent:
        agent.start("TP2")
        num_changes = 3
        for change in range(num_changes):
            see_steps(agent, change + 1, 0, 1)
            agent.change("TP2")
        see_steps(agent, num_changes + 1, 0, 1)
        agent.last_step_in(10)
        agent.finish()
        graphs = [lines(agent, generation, 0)[-1]["graphs"] for generation in range(1, num_changes + 2)]
        assert "recompile_limit" not in agent.logs()
    assert len(set(graphs)) == num_changes + 1, f"each generation is compiled: {graphs}"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU: g++")
def test_a_worker_that_joins_compiles_no_graph_that_others_have(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, job="compiled_job", verify=False, pause_s=0.01, timeout_s=600.0) as agent:
        agent.start("DP1")
        see_steps(agent, 1, 0)
        agent.change("DP2")
        see_steps(agent, 2, 0, 1)
        agent.last_step_in(10)
        agent.finish()
        joiner = lines(agent, 2, 1)[-1]
    assert (joiner["misses"], joiner["joint_misses"]) == (0, 0)
    assert joiner["hits"] + joiner["joint_hits"] > 0
