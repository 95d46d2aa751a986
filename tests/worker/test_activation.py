"""`TrainState.activate`: called for every generation on real tensors, in its groups; its result is trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import activated_job as job
import pytest
import torch
from mini_agent import NODE, MiniAgent, run_script

from etc_agent.control.causes import ErrorKind
from etc_agent.control.messages import Armed, Prepared, Raised
from etc_agent.parallel.topology import Slot


def slots(*indices: int) -> tuple[Slot, ...]:
    return tuple(Slot(NODE, index) for index in indices)


def see_a_step(agent: MiniAgent, generation: int, num_ranks: int, after: int = -1) -> list[dict[str, Any]]:
    """The lines of the first step after `after` that every rank of the generation has ended."""

    def found() -> list[dict[str, Any]]:
        lines = [line for line in agent.steps() if line["generation"] == generation and line["step"] > after]
        steps = sorted({line["step"] for line in lines})
        whole = [[line for line in lines if line["step"] == step] for step in steps]
        return next((each for each in whole if len(each) == num_ranks), [])

    agent.wait_for(lambda: bool(found()), f"a step of generation {generation}")
    return found()


def simulated(dp_of: dict[int, int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Step -> a weight and a running mean after it, as DistributedDataParallel over so many ranks has them on rank 0,
    computed by one process with plain modules."""
    torch.manual_seed(job.SEED)
    model, data, found = job.Net(), job.Samples(), {}
    optimizer = job.optimizer_of(model)
    for step, dp in sorted(dp_of.items()):
        share = job.GLOBAL_BATCH // dp
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        kept = before
        for rank in range(dp):
            model.load_state_dict(before, strict=False)
            first = step * job.GLOBAL_BATCH + rank * share
            batch = torch.stack([data[index] for index in range(first, first + share)])
            for half in batch.chunk(2):
                (job.loss_of(model, half) / 2 / dp).backward()
            if rank == 0:
                kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.load_state_dict(kept, strict=False)
        optimizer.step()
        optimizer.zero_grad()
        found[step] = model.down.weight.detach().flatten().clone(), model.norm.running_mean.clone()
    return found


def check_against_simulation(steps: list[dict[str, Any]]) -> None:
    expected = simulated({line["step"]: line["dp"] for line in steps})
    for line in steps:
        weight, mean = expected[line["step"]]
        torch.testing.assert_close(torch.tensor(line["weight"], dtype=torch.float64), weight, rtol=1e-9, atol=1e-9)
        if line["rank"] == 0:
            torch.testing.assert_close(torch.tensor(line["mean"], dtype=torch.float64), mean, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "fault", [
        {"migration": "keep", "counts": True, "comm_hook": True, "evaluates": True},
        pytest.param({"migration": "release", "keeps_old": True, "as_bucket_view": True}, marks=pytest.mark.long),
    ], ids=["keep", "release, and the script keeps old wrappers"],
)
def test_wrapped_models_train_on_as_if_the_job_had_always_had_its_size(fault: dict[str, Any], tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.01, verify=False, fault=fault, job="activated_job") as agent:
        agent.start("DP2")
        see_a_step(agent, 1, 2)
        agent.change("DP3", slots(1, 2, 3))  # rank 0, whose statistics count, leaves
        see_a_step(agent, 2, 3)
        switched = agent.change("DP2", slots(3, 1))  # and it moves
        assert all("activate" in each.phases_ms for slot, each in switched.items() if slot in slots(3, 1))
        last = see_a_step(agent, 3, 2)[0]["step"]
        lines = see_a_step(agent, 3, 2, after=last + 3)
        agent.last_step_in(20)
        agent.finish()
        steps = agent.steps()
    check_against_simulation(steps)
    assert not any(line["is_raw"] for line in steps)
    assert all(line["hooked"] == [line["generation"]] for line in steps), "hooks of earlier generations are gone"
    if fault.get("counts"):
        assert [line["wrapped"] for line in lines] == [1, 1], "no wrapper of another generation is left"
    survivor = next(line["activations"] for line in lines if len(line["activations"]) == 3)
    assert [(each["generation"], each["world"]) for each in survivor] == [(1, 2), (2, 3), (3, 2)]
    assert {(each["thread"], *each["devices"]) for each in survivor} == {("MainThread", "cpu")}
    joined = next(line["activations"] for line in lines if len(line["activations"]) == 2)
    assert [each["generation"] for each in joined] == [2, 3]


def test_a_change_does_not_show_in_random_streams_though_activate_draws(tmp_path: Path) -> None:
    drawn = []
    for changes in (False, True):
        folder = tmp_path / str(changes)
        folder.mkdir()
        with MiniAgent(folder, verify=False, job="activated_job") as agent:
            agent.start("DP2")
            see_a_step(agent, 1, 2)
            if changes:
                agent.change("DP3")
                see_a_step(agent, 2, 3)
            agent.last_step_in(20)
            agent.finish()
            drawn.append({line["step"]: line["drawn"] for line in agent.steps() if line["rank"] == 0})
    common = drawn[0].keys() & drawn[1].keys()
    assert {step: drawn[0][step] for step in common} == {step: drawn[1][step] for step in common}


def test_a_worker_that_dies_while_activating_is_lost_like_any_other(tmp_path: Path) -> None:
    fault = {"die_activating": [2, 1]}
    with MiniAgent(tmp_path, pause_s=0.01, verify=False, fault=fault, job="activated_job") as agent:
        agent.start("DP2")
        see_a_step(agent, 1, 2)
        generation, everyone = agent.prepare("DP3")
        for slot in everyone:
            agent.hear(slot, Prepared, generation=generation.id)
        for slot in everyone:
            agent.send(slot, Armed(generation.id))
        agent.await_death(*slots(1))
        agreed = agent.agree(agent.freeze(), generation)
        assert agreed.generation == generation.id, "the switch was over"
        agent.recover("DP2")
        lines = see_a_step(agent, 3, 2)
        agent.last_step_in(10)
        agent.finish()
        check_against_simulation(agent.steps())
    assert [each["generation"] for each in lines[0]["activations"]] == [1, 2, 3]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"wrap": "fail"}, "LookupError: there is no such compiler"),
        ({"wrap": "add"}, "TrainState.activate has added, removed or replaced extra of the model; make, shard"),
    ],
    ids=["raises", "adds a parameter"],
)
def test_an_activate_that_fails_is_the_scripts_failure(fault: dict[str, Any], message: str, tmp_path: Path) -> None:
    with MiniAgent(tmp_path, verify=False, fault=fault, job="activated_job") as agent:
        agent.start("DP2")
        raised = [agent.hear(slot, Raised) for slot in slots(0, 1)]
        assert {(each.kind, message in each.error) for each in raised} == {(ErrorKind.RAISED, True)}
        agent.wait_for(lambda: "in activate\n" in agent.logs() or fault["wrap"] == "add", "the script's own traceback")


def test_an_activate_that_fails_after_a_change_is_the_scripts_failure(tmp_path: Path) -> None:
    fault = {"wrap": "fail", "fails_in": 2}
    with MiniAgent(tmp_path, verify=False, fault=fault, job="activated_job") as agent:
        agent.start("DP2")
        see_a_step(agent, 1, 2)
        generation, everyone = agent.prepare("DP3")
        for slot in everyone:
            agent.hear(slot, Prepared, generation=generation.id)
        for slot in everyone:
            agent.send(slot, Armed(generation.id))
        for slot in everyone:
            raised = agent.hear(slot, Raised)
            assert (raised.kind, raised.error) == (ErrorKind.RAISED, "LookupError: there is no such compiler")


def test_activate_is_called_without_an_agent_too(tmp_path: Path) -> None:
    code = """
import activated_job as job
import etc_agent as etc
with etc.session(job.build) as session:
    assert type(session.model).__name__ == "DistributedDataParallel", session.model
    assert session.model.module is session.state.model
print("activated", job.ACTIVATIONS)
"""
    exit_code, written = run_script(code, tmp_path / "script.log", {})
    assert exit_code == 0, written
    assert "activated [{'generation': 1, 'thread': 'MainThread', 'devices': ['cpu'], 'world': 1}]" in written
