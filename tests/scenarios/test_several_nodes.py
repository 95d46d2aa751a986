"""Several agents, each its own node with an address of its own, share one etcd and one job."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from running import (
    TINY_JOB,
    Etcd,
    EtcRun,
    etcd_leader,
    steps_of,
    wait_for_more_steps,
    wait_for_step,
    wait_for_workers,
    wait_until,
)

from etc_agent.rendezvous.private.server import EtcdServer

Cleanup = Callable[[EtcRun], EtcRun]


def node(
    tmp_path: Path, server: EtcdServer, number: int, *script: object, run_id: str = "job", nnodes: str = "1:3"
) -> EtcRun:
    return EtcRun(
        "--nnodes", nnodes, "--nproc-per-node", 1, "--rdzv-id", run_id, "--rdzv-conf", "lease_s=4",
        "--etcd-endpoints", server.endpoint, "--local-addr", f"127.0.0.{number}", *script, cwd=tmp_path,
    )


def tiny(tmp_path: Path, steps: int = 100_000, pause_s: float = 0.05) -> tuple[object, ...]:
    return (TINY_JOB, tmp_path, steps, pause_s)


def test_nodes_join_and_leave_while_the_job_trains(tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer) -> None:
    etcd = Etcd(etcd_server.endpoint, "job")
    first = cleanup(node(tmp_path, etcd_server, 2, *tiny(tmp_path)))
    wait_for_step(tmp_path, 3)
    second = cleanup(node(tmp_path, etcd_server, 3, *tiny(tmp_path)))
    third = cleanup(node(tmp_path, etcd_server, 4, *tiny(tmp_path)))
    wait_until(lambda: len((etcd.get("status") or {}).get("nodes", ())) == 3, "three nodes")

    first.send(signal.SIGTERM)  # the node of rank 0, of the store and of the leader
    assert first.wait() == 0
    first.assert_nothing_left()
    wait_for_more_steps(tmp_path, 5)
    generation = etcd.get(f"generations/{etcd.get('current')['committed']}")
    assert {slot.split("/")[0] for slot in generation["placement"]} == {"127.0.0.3", "127.0.0.4"}

    etcd.put("control/drain/127.0.0.3", "")
    assert second.wait() == 0
    wait_for_more_steps(tmp_path, 5)
    current = etcd.get("current")
    assert current["next_id"] == current["committed"] + 1, "the node that left was not asked back"

    lines = steps_of(tmp_path)
    every = {line["step"] for line in lines}
    assert every == set(range(max(every) + 1)), "no step was lost"
    ids = {(line["step"], sample) for line in lines for sample in line["ids"] if line["step"] < max(every)}
    assert ids == {(step, 12 * step + k) for step in range(max(every)) for k in range(12)}
    assert len({line["pid"] for line in lines}) == 3, "no worker was restarted"

    third.send(signal.SIGTERM)  # the last one: that is a stop
    assert third.wait() == 143
    third.assert_nothing_left()


def test_below_the_smallest_number_of_nodes_the_job_is_held_and_loses_nothing(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    etcd = Etcd(etcd_server.endpoint, "job")
    first, second = (cleanup(node(tmp_path, etcd_server, n, *tiny(tmp_path), nnodes="2:3")) for n in (2, 3))
    wait_for_step(tmp_path, 3)
    second.send(signal.SIGTERM)
    assert second.wait() == 0
    first.wait_for("too few nodes are left")
    wait_until(lambda: etcd.get("status")["phase"] == "held", "the hold")
    step = max(line["step"] for line in steps_of(tmp_path))
    third = cleanup(node(tmp_path, etcd_server, 4, *tiny(tmp_path), nnodes="2:3"))
    wait_for_step(tmp_path, step + 5)
    lines = steps_of(tmp_path)
    ids = sorted((line["step"], sample) for line in lines for sample in line["ids"] if line["step"] < step + 5)
    assert ids == [(step, 12 * step + k) for step in range(step + 5) for k in range(12)], "each sample once"
    assert len({line["pid"] for line in lines}) == 3, "no worker was restarted"
    for run in (first, third):
        run.send(signal.SIGTERM)
    assert {first.wait(), third.wait()} <= {0, 143}


def test_a_lost_node_is_noticed_within_its_lease_and_the_rest_goes_on(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    nodes = [cleanup(node(tmp_path, etcd_server, number, *tiny(tmp_path))) for number in (2, 3)]
    etcd = Etcd(etcd_server.endpoint, "job")
    wait_until(lambda: len((etcd.get("status") or {}).get("nodes", ())) == 2, "two nodes")
    leader = next(run for run, number in zip(nodes, (2, 3), strict=True) if etcd_leader(etcd) == f"127.0.0.{number}")
    other = next(run for run in nodes if run is not leader)
    leader.send(signal.SIGKILL)
    leader.wait()
    leader.assert_nothing_left()
    other.wait_for(r"starts \(node \S+ was lost\)", 40)
    generation = etcd.get("current")["committed"]
    wait_until(lambda: any(line["generation"] == generation for line in steps_of(tmp_path)), "steps after the loss")
    other.send(signal.SIGINT)
    assert other.wait() == 130


def test_a_request_for_more_than_is_present_waits_for_a_node(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    etcd = Etcd(etcd_server.endpoint, "job")
    first = cleanup(node(tmp_path, etcd_server, 2, *tiny(tmp_path)))
    wait_for_step(tmp_path, 3)
    etcd.scale("2")
    assert "waiting for nodes" in etcd.reply_to("2", "pending")["message"]
    second = cleanup(node(tmp_path, etcd_server, 3, *tiny(tmp_path)))
    etcd.reply_to("2", "done")
    for run in (first, second):
        run.send(signal.SIGTERM)
    assert {first.wait(), second.wait()} <= {0, 143}


def test_a_job_of_another_size_with_the_same_run_id_is_turned_away(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    script = tmp_path / "wait.py"
    script.write_text("import time; time.sleep(600)")
    first = cleanup(node(tmp_path, etcd_server, 2, script, nnodes="1"))
    first.wait_for("starts")
    second = cleanup(node(tmp_path, etcd_server, 3, script, nnodes="1:2"))
    assert second.wait() == 1
    (line,) = second.our_lines()
    assert "run id 'job' is a job whose nnodes is 1:1, and this node was given 1:2" in line
    elsewhere = cleanup(node(tmp_path, etcd_server, 4, script, run_id="job2", nnodes="1:2"))
    elsewhere.wait_for("starts")
    for run in (first, elsewhere):
        run.send(signal.SIGINT)
        assert run.wait() == 130
        run.assert_nothing_left()
    again = cleanup(node(tmp_path, etcd_server, 5, script, "other-arguments", nnodes="1"))
    again.wait_for("generation 1, .* starts")
    again.send(signal.SIGINT)
    assert again.wait() == 130


def test_an_etcd_that_cannot_be_reached_is_said_in_one_line(tmp_path: Path, cleanup: Cleanup) -> None:
    script = tmp_path / "never.py"
    script.write_text("raise SystemExit(9)")
    options = ("--nnodes", 1, "--rdzv-id", "job", "--rdzv-conf", "etcd_s=1", "--etcd-endpoints", "127.0.0.1:1")
    job = cleanup(EtcRun(*options, script, cwd=tmp_path))
    assert job.wait() == 1
    (line,) = job.our_lines()
    assert "etcd does not answer at 127.0.0.1:1" in line
    job.assert_nothing_left()


def test_training_goes_on_while_etcd_is_away_and_requests_are_met_when_it_is_back(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    etcd = Etcd(etcd_server.endpoint, "job")
    nodes = [cleanup(node(tmp_path, etcd_server, number, *tiny(tmp_path))) for number in (2, 3)]
    wait_until(lambda: len((etcd.get("status") or {}).get("nodes", ())) == 2, "two nodes")
    wait_for_workers(tmp_path, 2)
    generation = etcd.get("current")["committed"]
    etcd_server.kill()
    wait_for_more_steps(tmp_path, 100)
    etcd_server.start_again()
    etcd.scale("1")
    etcd.reply_to("1", "done")
    assert etcd.get("current")["committed"] == generation + 1, "the outage itself changed nothing"
    pids = {line["pid"] for line in steps_of(tmp_path)}
    assert len(pids) == 2, "no worker was restarted"
    for run in nodes:
        run.send(signal.SIGTERM)
    assert {run.wait() for run in nodes} <= {0, 143}


def test_a_node_that_is_told_to_leave_while_etcd_is_away_hands_over_its_state_when_it_is_back(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    etcd = Etcd(etcd_server.endpoint, "job")
    first, second = (cleanup(node(tmp_path, etcd_server, number, *tiny(tmp_path))) for number in (2, 3))
    wait_until(lambda: len((etcd.get("status") or {}).get("nodes", ())) == 2, "two nodes")
    wait_for_workers(tmp_path, 2)
    etcd_server.kill()
    second.send(signal.SIGTERM)
    second.wait_for("could not be written to etcd and will be when it answers")
    wait_for_more_steps(tmp_path, 5)
    etcd_server.start_again()
    assert second.wait() == 0
    wait_for_more_steps(tmp_path, 5)
    assert len({line["pid"] for line in steps_of(tmp_path)}) == 2, "no worker was restarted"
    first.send(signal.SIGTERM)
    assert first.wait() == 143
