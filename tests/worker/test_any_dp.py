"""A job whose dp need not divide its global batch, fed by a loader whose processes outlive changes of size."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from loader_job import GLOBAL_BATCH, Points, loss_of, model
from mini_agent import MiniAgent

from etc_agent.worker.data.epochs import Epochs


@pytest.mark.long
def test_every_step_takes_its_global_batch_once_and_the_loss_is_that_of_one_worker(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, job="loader_job", pause_s=0.02) as agent:
        agent.start("DP2")
        for config in ("DP3", "DP4", "DP1", "DP3"):
            agent.change(config)
            agent.first_steps()
        last = agent.last_step_in(6)
        assert set(agent.finish().values()) == {0}
        lines = agent.steps()

    order = Epochs(37, 30, 3)
    network = model()
    torch.nn.init.constant_(network.weight, 0.1)
    torch.nn.init.constant_(network.bias, 0.1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    by_step = defaultdict(list)
    for line in lines:
        by_step[line["step"]].append(line)
    assert sorted(by_step) == list(range(last + 1))
    assert {line["dp"] for line in lines} == {1, 2, 3, 4}
    for step, entries in sorted(by_step.items()):
        entries.sort(key=lambda entry: entry["rank"])
        numbers = [i for entry in entries for i in entry["ids"]]
        assert numbers == list(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH))
        assert [i for entry in entries for i in entry["used"]] == [order.index(number) for number in numbers]
        x = torch.stack([seeded_sample(order.index(number), number) for number in numbers])
        loss = loss_of(network, x)
        assert [entry["loss"] for entry in entries] == pytest.approx([loss.item()] * len(entries), rel=1e-9)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for pid in {line["pid"] for line in lines}:
        assert len({loader for line in lines if line["pid"] == pid for loader in line["loaders"]}) == 1


def seeded_sample(index: int, number: int) -> torch.Tensor:
    torch.manual_seed(7 + number)
    return Points()[index]["x"]
