"""A tensor-parallel layer that is cut by hand, without DTensors, changes its size with its fused weight."""

from __future__ import annotations

import sys
from pathlib import Path

import layout_job
import pytest
import torch
from mini_agent import MiniAgent

sys.path.insert(0, str(Path(__file__).parents[1]))
from oracle import assert_same_bits, gathered

from etc_agent.parallel.config import ParallelConfig
from tests.scenarios.running import steps_of


def test_a_fused_weight_and_its_moments_go_from_2_ranks_to_4_and_on(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02, job="layout_job") as agent:
        agent.start("TP2")
        previous = ParallelConfig(tp=2)
        for text in ("TP4", "DP2", "TP2DP2", "TP1"):
            agent.change(text)
            assert agent.generation is not None
            number, current = agent.generation.id, ParallelConfig.parse(text)
            old = gathered(agent.dump_dir, number, "old", previous.num_ranks)
            assert {"model.fused", "optimizer.fused.exp_avg", "optimizer.fused.step"} <= old.keys()
            assert_same_bits(old, gathered(agent.dump_dir, number, "new", current.num_ranks))
            previous = current
        agent.first_steps()
        agent.last_step_in(3)
        assert set(agent.finish().values()) == {0}
        lines = steps_of(agent.directory)
    losses = {line["step"]: line["loss"] for line in lines}
    assert losses == pytest.approx(alone(max(losses) + 1), abs=1e-5)


def alone(num_steps: int) -> dict[int, float]:
    """The losses of the whole model on one rank, without a session."""
    model = layout_job.Fused(1)
    numbers = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in (model.fused, model.out):
            param.copy_(torch.rand(param.shape, generator=numbers) - 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data, losses = layout_job.Samples(), {}
    for step in range(num_steps):
        batch = torch.stack([data[index] for index in range(step * 12, step * 12 + 12)])
        loss = ((model(batch) - torch.cos(batch)) ** 2).mean()
        losses[step] = loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses
