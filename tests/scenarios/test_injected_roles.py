"""Whoever dies at a chosen point (the store's node, the leader's, a worker that ends without a word, one in a release
switch, one with a part of FSDP2's state): the survivors go on, bit for bit as if it had been planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from injection import INJECTED_JOB, InjectedRun, check_account, check_bits, options_json, pids_of_node
from running import Etcd, EtcRun, etcd_leader, etcd_of, standalone

from etc_agent.rendezvous.private.server import EtcdServer
from tests.worker.injected_job import Death

Cleanup = Callable[[EtcRun], EtcRun]
RULES = "failures: {max_per_window: 0}\ntimeouts: {retry_s: 1}\n"


def on_one_node(tmp_path: Path, cleanup: Cleanup, full: str, **fault: object) -> InjectedRun:
    folder = tmp_path / "job"
    folder.mkdir()
    (tmp_path / "job.yaml").write_text(RULES)
    options = ("--config", tmp_path / "job.yaml", "--parallel", full, "--max-restarts", 0)
    script = (INJECTED_JOB, folder, 1_000_000, 0.01, options_json(**fault))
    job = cleanup(standalone(tmp_path, *script, slots=4, options=options))
    run = InjectedRun(folder, job, etcd_of(job), full)
    run.settle()
    return run


def end_and_check(run: InjectedRun, tmp_path: Path, model: str, num_deaths: int) -> None:
    last = run.end()
    lines = run.lines()
    assert run.num_deaths == num_deaths
    check_account(lines, run.dead, last, num_deaths)
    check_bits(tmp_path / "replay", lines, run.dead, last, {"model": model})


def on_three_nodes(tmp_path: Path, cleanup: Cleanup, server: EtcdServer) -> dict[str, EtcRun]:
    """The nodes by name, of one worker each."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job.yaml").write_text(RULES)
    return {
        f"127.0.0.{number}": cleanup(EtcRun(
            "--nnodes", "1:3", "--nproc-per-node", 1, "--rdzv-id", "job", "--etcd-endpoints", server.endpoint,
            "--config", tmp_path / "job.yaml", "--local-addr", f"127.0.0.{number}", "--max-restarts", 0,
            INJECTED_JOB, tmp_path / "job", 1_000_000, 0.02, options_json(model="gpt"), cwd=tmp_path,
        ))
        for number in (2, 3, 4)
    }


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", ["backward", "after_vote", "safe_point"])
@pytest.mark.parametrize("role", ["store", "leader"])
def test_the_machine_of_the_store_or_of_the_leader_is_lost_at_a_point_of_a_step(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer, role: str, point: str
) -> None:
    nodes = on_three_nodes(tmp_path, cleanup, etcd_server)
    etcd = Etcd(etcd_server.endpoint, "job")
    run = InjectedRun(tmp_path / "job", next(iter(nodes.values())), etcd, "PP1TP1DP3")
    run.settle()
    generation = etcd.get(f"generations/{run.settle()}")
    name = etcd_leader(etcd) if role == "leader" else generation["store"].rpartition(":")[0]
    rank = generation["placement"].index(f"{name}/0")
    lost = nodes.pop(name)
    run.job = next(iter(nodes.values()))
    run.die_in_step(Death(rank, point, pids=pids_of_node(lost)))
    run.full = "PP1TP1DP2"
    run.settle()
    end_and_check(run, tmp_path, "gpt", 1)


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", ["forward", "backward", "before_vote", "in_vote", "after_vote", "applied"])
def test_a_death_at_any_point_of_a_step_of_fsdp2_with_replicas(tmp_path: Path, cleanup: Cleanup, point: str) -> None:
    run = on_one_node(tmp_path, cleanup, "PP1TP2DP2", model="hsdp")
    run.die_in_step(Death(3, point))
    run.settle()
    end_and_check(run, tmp_path, "hsdp", 1)


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", ["prepare", "prepared", "begin", "after_commit"])
def test_a_death_in_a_release_switch_costs_nothing_but_a_step_where_nothing_was_released_yet_or_all_was(
    tmp_path: Path, cleanup: Cleanup, point: str
) -> None:
    run = on_one_node(tmp_path, cleanup, "PP2TP1DP2", model="gpt", migration="release")
    run.die_in_change(Death(3, point), "PP1TP2DP2")
    run.full = "PP1TP2DP2"
    run.settle()
    if point != "after_commit":
        end_and_check(run, tmp_path, "gpt", 1)
        return
    # All have entered the next generation, and left it before its first step: the replay does not see it, and with it
    # the random streams that began there.
    last = run.end()
    check_account(run.lines(), run.dead, last, 1)


def test_a_worker_that_exits_with_code_0_in_a_step_is_lost_like_any_other(tmp_path: Path, cleanup: Cleanup) -> None:
    run = on_one_node(tmp_path, cleanup, "PP1TP1DP3", model="ddp")
    run.etcd.put("control/pause", "true")  # growing back would take longer than all the rest
    run.die_in_step(Death(1, "backward", exits=True))
    run.full = "PP1TP1DP2"
    generation = run.settle()
    why = run.etcd.get(f"generations/{generation}")["reason"]
    assert "it ended with exit code 0 before its session was closed, and the others still needed it" in why
    end_and_check(run, tmp_path, "ddp", 1)
