"""The session in real processes: joining, leaving, staying, refusing, failing."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mini_agent import NODE, MiniAgent, run_script

from etc_agent.control.causes import ErrorKind
from etc_agent.control.messages import Armed, Prepare, Prepared, Raised, Refused
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.state.encoding import decode_layout

JOB = str(Path(__file__).with_name("tiny_job.py"))


def slot(index: int) -> Slot:
    return Slot(NODE, index)


def test_a_job_grows_and_shrinks_in_its_processes_and_no_sample_is_lost_or_repeated(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02) as agent:
        agent.start("PP2")
        for config in ("PP2TP2", "TP2DP2", "PP2", "DP4"):
            agent.change(config)
            agent.first_steps()
        last = agent.last_step_in(10)
        assert set(agent.finish().values()) == {0}
        lines = agent.steps()

    traces = sorted(path.name for path in (tmp_path / "trace").iterdir())
    assert traces == [f"switch-{generation}-worker-{worker}.json" for generation in range(2, 6) for worker in range(4)]
    spans = {event["name"] for event in json.loads((tmp_path / "trace" / traces[0]).read_text())["traceEvents"]}
    assert {"migrate", "local copies", "vote", "swap", "held bytes"} <= spans

    by_step: dict[int, list[dict]] = {}
    for line in lines:
        by_step.setdefault(line["step"], []).append(line)
    assert sorted(by_step) == list(range(last + 1))
    for step, entries in by_step.items():
        # One generation, one loss, and between the dp ranks every sample of the step once.
        assert len({(entry["generation"], entry["config"], entry["loss"]) for entry in entries}) == 1
        ids = {entry["dp"]: entry["ids"] for entry in entries}
        assert [i for dp in sorted(ids) for i in ids[dp]] == list(range(step * 12, step * 12 + 12))
        for entry in entries:
            assert entry["env_rank"] == entry["rank"]
            assert entry["env_world_size"] == len(entries)
            assert math.isclose(entry["lr"], 0.01 / (1.0 + 0.01 * (step + 1)))
    rank_0 = {line["pid"] for line in lines if line["rank"] == 0}
    assert len(rank_0) == 1, "rank 0 stays on its process"
    assert len({line["generation"] for line in lines}) == 5


def test_a_scripts_own_state_follows_the_rule_that_it_declares(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02, verify=False) as agent:
        agent.start("DP2")
        for config in ("DP3", "TP2"):
            agent.change(config)
            agent.first_steps()
        agent.last_step_in(10)
        agent.finish()
        lines = agent.steps()
    steps: dict[int, set[int]] = {}
    for line in lines:
        steps.setdefault(line["generation"], set()).add(line["step"])
    first = {generation: min(seen) for generation, seen in steps.items()}
    for line in lines:
        generation, step = line["generation"], line["step"]
        # Place 0 is there all along; dp 1 from the start until tp comes instead; dp 2 and tp 1 are new when they come.
        began = 0 if line["rank"] == 0 or (generation < 3 and line["rank"] == 1) else first[generation]
        assert line["own_steps"] == step - began + 1
        if step == first[generation] and step > 2:
            # What other ranks trained on before the change is known to each.
            assert set(range((step - 2) * 12, step * 12)) <= set(line["seen"])


def test_the_loss_goes_on_as_if_nothing_had_changed(tmp_path: Path) -> None:
    (tmp_path / "changing").mkdir()
    (tmp_path / "fixed").mkdir()
    with MiniAgent(tmp_path / "changing", pause_s=0.02, verify=False) as agent:
        agent.start("PP2")
        for config in ("TP2", "DP2"):
            agent.change(config)
            agent.first_steps()
        last = agent.last_step_in(10)
        agent.finish()
        changing = {line["step"]: line["loss"] for line in agent.steps()}
    with MiniAgent(tmp_path / "fixed", num_steps=last + 1, pause_s=0.0, verify=False) as agent:
        agent.start("PP2")
        agent.finish()
        fixed = {line["step"]: line["loss"] for line in agent.steps()}
    assert sorted(changing) == sorted(fixed) == list(range(last + 1))
    # Only the order of float32 sums differs between configs; some dozen steps of AdamW amplify it to a few 1e-6.
    assert max(abs(changing[step] - fixed[step]) / fixed[step] for step in fixed) < 1e-4


def test_ranks_can_move_between_the_same_processes(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02) as agent:
        agent.start("PP2TP2")
        agent.change("PP2TP2", (slot(2), slot(1), slot(0), slot(3)))
        steps = agent.first_steps()
        assert set(steps) == {slot(i) for i in range(4)}
        agent.change("PP2TP2", (slot(7), slot(1), slot(0), slot(3)))
        agent.first_steps()


def test_groups_that_are_named_after_their_ranks_work_in_every_generation(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02, fault={"local_groups": True}) as agent:
        agent.start("DP2")
        for placement in ((slot(1), slot(0)), (slot(0), slot(1)), (slot(0), slot(2))):
            agent.change("DP2", placement)
            agent.first_steps()
        agent.last_step_in(5)
        assert set(agent.finish().values()) == {0}
        lines = agent.steps()
    for step in {line["step"] for line in lines}:
        assert len({line["loss"] for line in lines if line["step"] == step}) == 1


def test_ten_changes_leave_no_descriptor_thread_group_or_memory_behind(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02, verify=False) as agent:
        agent.start("PP2")
        for _ in range(6):
            for config in ("TP2", "PP2"):
                agent.change(config)
                agent.first_steps()
        generation = agent.generation
        assert generation is not None

        def held(number: int) -> list[int]:
            """The fewest descriptors, threads and pieces of shared memory of rank 0 in a generation: once the old
            groups are gone."""
            lines = [line for line in agent.steps() if line["rank"] == 0 and line["generation"] == number]
            return [min((line[key] for line in lines), default=1_000_000) for key in ("fds", "threads", "shared")]

        def settled() -> bool:
            return all(now <= first for now, first in zip(held(generation.id), held(3), strict=True))

        agent.wait_for(settled, "no more descriptors, threads and shared memory than after the first changes")
        assert held(generation.id)[2] >= 1


def test_describing_a_config_gives_its_layout_or_the_models_own_reason(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02) as agent:
        agent.start("PP2")
        described = agent.describe(slot(0), "PP2TP2DP2")
        assert described.layout is not None
        layout = decode_layout(described.layout)
        assert len(layout) == 8
        names = {shard.tensor.name for manifest in layout for shard in manifest}
        assert {"model.layers.0.up.weight", "optimizer.layers.4.down.bias.exp_avg"} <= names
        refused = agent.describe(slot(0), "TP5")
        assert (refused.layout, refused.kind) == (None, ErrorKind.MODEL)
        assert refused.error == "PP1TP5DP1: 12 hidden units cannot be divided over tp=5"
        uneven = agent.describe(slot(1), "DP5")
        assert uneven.error.startswith("PP1TP1DP5: a global batch of 12 cannot be divided over dp=5; choose dp from 1")


def test_a_refused_generation_is_refused_by_everyone_and_training_goes_on(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02) as agent:
        agent.start("PP1")
        generation, everyone = agent.prepare("TP5")
        for each in everyone:
            refused = agent.hear(each, Refused, generation=generation.id)
            assert "12 hidden units cannot be divided over tp=5" in refused.error
            assert refused.kind is ErrorKind.MODEL
        agent.withdraw(generation, everyone)
        agent.change("TP2")
        agent.first_steps()


def test_a_withdrawn_generation_leaves_the_present_one_training_and_its_joiners_exit_0(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02) as agent:
        agent.start("PP2")
        generation, everyone = agent.prepare("PP4")
        for each in everyone:
            agent.hear(each, Prepared, generation=generation.id)
        agent.withdraw(generation, everyone)
        last = agent.steps()[-1]["step"]
        agent.wait_for(lambda: agent.steps()[-1]["step"] > last + 3, "more steps in the old generation")
        assert agent.steps()[-1]["generation"] == 1
        agent.change("DP2")
        agent.first_steps()


def test_a_generation_armed_on_some_workers_only_can_still_be_withdrawn(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02) as agent:
        agent.start("PP2")
        generation, everyone = agent.prepare("PP3")
        for each in everyone:
            agent.hear(each, Prepared, generation=generation.id)
        for each in (slot(0), slot(2)):
            agent.send(each, Armed(generation.id))
        last = agent.steps()[-1]["step"]
        agent.wait_for(lambda: agent.steps()[-1]["step"] > last + 3, "steps that vote in vain for generation 2")
        agent.withdraw(generation, everyone)
        agent.change("PP3")
        agent.first_steps()
        assert {line["generation"] for line in agent.steps()} <= {1, 3}


def test_a_job_that_ends_while_a_preparation_waits_for_a_peer_ends_well(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02) as agent:
        agent.start("PP2")
        previous = agent.generation
        assert previous is not None
        placement = (slot(0), slot(1), slot(9))
        generation = Generation(2, ParallelConfig.parse("PP3"), placement, previous.store, 1)
        for each in (slot(0), slot(1)):
            agent.send(each, Prepare(NODE, generation.to_json(), previous.to_json()))
        agent.wait_for(lambda: bool(agent.steps()), "the first step")
        agent.last_step_in(10)
        assert agent.finish() == {slot(0): 0, slot(1): 0}
        assert agent.logs() == ""


def test_a_migration_that_fails_on_one_worker_is_voted_down_and_everyone_stays(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02, fault={"forget_scheduler": [2, 1]}) as agent:
        agent.start("PP2")
        generation, everyone = agent.prepare("TP2")
        for each in everyone:
            agent.hear(each, Prepared, generation=generation.id)
            agent.send(each, Armed(generation.id))
        refusals = [agent.hear(each, Refused, generation=generation.id) for each in everyone]
        assert {(refused.error, refused.kind) for refused in refusals} == {
            ("build() must make a scheduler in every generation and on every rank, or in none", ErrorKind.RAISED),
            ("the migration failed on another worker", ErrorKind.PEER_LOST),
        }
        agent.change("DP2")
        agent.first_steps()
        agent.wait_for(lambda: {line["generation"] for line in agent.steps()} == {1, 3}, "steps in generation 3")


def test_an_exception_in_user_code_is_told_to_the_agent_and_surfaces_with_its_traceback(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, fault={"raise_at": 3, "timeout_s": 10.0, "loss_timeout_s": 1.0}) as agent:
        agent.start("PP1")
        raised = agent.hear(slot(0), Raised)
        assert (raised.error, raised.kind) == ("KeyError: 'a bug in user code'", ErrorKind.RAISED)
        assert agent.finish() == {slot(0): 1}
        logs = agent.logs()
        assert "KeyError: 'a bug in user code'" in logs
        assert 'raise KeyError("a bug in user code")' in logs


def test_an_error_that_speaks_of_a_connection_is_the_scripts_own_and_the_peers_say_that_they_lost_one(
    tmp_path: Path,
) -> None:
    with MiniAgent(tmp_path, fault={"raise_at": 3, "raises": "reset", "loss_timeout_s": 1.0}) as agent:
        agent.start("DP2")
        raised = agent.hear(slot(0), Raised)
        assert (raised.error, raised.kind) == ("ConnectionResetError: connection reset by peer", ErrorKind.RAISED)
        assert agent.hear(slot(1), Raised).kind is ErrorKind.PEER_LOST
        assert agent.finish() == {slot(0): 1, slot(1): 1}


def test_the_same_script_runs_at_a_fixed_size_under_plain_torchrun(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", JOB, str(tmp_path), "4", "0"]
    environment = {**os.environ, "ETC_PARALLEL": "PP2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("steps-*.jsonl"))) == 2


@pytest.mark.parametrize(
    ("code", "environment", "message"),
    [
        (
            "import torch.distributed as dist; from torch.distributed import HashStore\n"
            "dist.init_process_group('gloo', store=HashStore(), rank=0, world_size=1)\n"
            "import etc_agent as etc\n"
            "with etc.session(lambda parallel: None): pass",
            {},
            "EtcError: init_process_group was called before etc.session(); "
            "remove it, the session makes the process groups",
        ),
        (
            "import etc_agent as etc, torch.distributed as dist, tiny_job\n"
            "with etc.session(tiny_job.build) as session: dist.init_process_group('gloo')",
            {},
            "EtcError: init_process_group was called inside etc.session(); "
            "remove it, the session has made the process groups",
        ),
        (
            "import etc_agent as etc, tiny_job\n"
            "with etc.session(tiny_job.build) as session:\n"
            "    for step in session.steps(1):\n"
            "        with step: pass",
            {},
            "EtcError: step 0 ended without step.commit(); call it after the backward pass",
        ),
        (
            "import etc_agent as etc, tiny_job\n"
            "with etc.session(tiny_job.build, parallel='TP2'): pass",
            {},
            "EtcError: PP1TP2DP1 has 2 ranks, but 1 workers were started; "
            "choose a config whose degrees multiply to 1",
        ),
        (
            "import etc_agent as etc\nwith etc.session(lambda parallel: 3): pass",
            {},
            "EtcError: build() returned a int; it must return an etc_agent.TrainState",
        ),
        (
            "import etc_agent as etc, tiny_job\nwith etc.session(tiny_job.build): pass",
            {"ETC_PARALLEL": "PP0"},
            "EtcError: ETC_PARALLEL: pp must be a positive integer, not 0",
        ),
    ],
    ids=["init before", "init inside", "no commit", "wrong size", "no state", "bad config"],
)
def test_a_mistake_in_the_script_is_one_clear_line(
    code: str, environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    exit_code, written = run_script(code, tmp_path / "script.log", environment)
    assert exit_code == 1
    assert message in " ".join(written.split())
