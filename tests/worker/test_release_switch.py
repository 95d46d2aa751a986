"""Switches in `release` mode: the old state goes as the new one comes."""

from __future__ import annotations

import sys
from pathlib import Path

from mini_agent import MiniAgent, run_script

sys.path.insert(0, str(Path(__file__).parents[1]))
from oracle import assert_same_bits, gathered

from etc_agent.control.messages import Armed, Prepared, Raised
from etc_agent.parallel.config import ParallelConfig


def test_a_job_changes_its_size_in_release_mode_and_keeps_every_bit(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02, fault={"migration": "release"}) as agent:
        agent.start("PP2")
        previous = ParallelConfig.parse("PP2")
        for text in ("PP2TP2", "TP4", "TP2DP2", "PP2", "DP3"):
            agent.change(text)
            agent.first_steps()
            assert agent.generation is not None
            number, current = agent.generation.id, ParallelConfig.parse(text)
            old = gathered(agent.dump_dir, number, "old", previous.num_ranks)
            new = gathered(agent.dump_dir, number, "new", current.num_ranks)
            assert any(name.endswith("exp_avg_sq") for name in old)
            assert_same_bits(old, new)
            previous = current
        last = agent.last_step_in(5)
        assert set(agent.finish().values()) == {0}
        assert {line["step"] for line in agent.steps()} == set(range(last + 1))
        assert "generation 2 is migrated to in release mode, since worker 0 asks for it" in agent.logs()


def test_a_budget_that_old_and_new_state_exceed_together_makes_auto_release(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02, verify=False, fault={"budget_bytes": 14_000}) as agent:
        agent.start("PP2")
        agent.change("TP2")
        agent.first_steps()
        logs = agent.logs()
    assert "in release mode, since old and new state of worker" in logs
    assert "there is room for 14,000" in logs


def test_a_release_that_fails_after_it_began_says_what_is_lost_and_ends_the_job(tmp_path: Path) -> None:
    fault = {"migration": "release", "forget_scheduler": [2, 1]}
    with MiniAgent(tmp_path, pause_s=0.02, fault=fault) as agent:
        agent.start("PP2")
        generation, everyone = agent.prepare("TP2")
        for each in everyone:
            agent.hear(each, Prepared, generation=generation.id)
            agent.send(each, Armed(generation.id))
        for each in everyone:
            raised = agent.hear(each, Raised)
            assert "the switch to generation 2 failed" in raised.error
            assert "has released its shards of 'model." in raised.error
            assert "the state has to come from a checkpoint" in raised.error
        assert set(agent.finish().values()) == {1}


def test_an_unknown_mode_is_one_clear_line(tmp_path: Path) -> None:
    code = "import etc_agent as etc\netc.session(lambda parallel: None)"
    exit_code, written = run_script(code, tmp_path / "log", {"ETC_MIGRATION": "fast"})
    assert exit_code == 1
    assert "ETC_MIGRATION='fast' is no mode; set it to one of auto, keep, release" in written
