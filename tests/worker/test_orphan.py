"""A worker whose agent and guardian are both gone."""

from __future__ import annotations

from pathlib import Path

from mini_agent import MiniAgent


def test_workers_that_nobody_ends_end_themselves(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02) as agent:
        agent.start("DP2")
        agent.change("PP2")
        agent.first_steps()
        for worker in agent.workers.values():
            assert worker.channel is not None
            worker.channel.close()
        assert all(code != 0 for code in agent.finish().values())
        assert "the agent is gone and nobody has ended this worker" in agent.logs()
