"""What etcd and the way to it can do to a job: training goes on, and requests are met when they can be."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
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

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import EtcdError
from etc_agent.rendezvous.private.server import EtcdServer
from tests.rendezvous.etcd_helpers import Wire, etcd_cluster, freeze

Cleanup = Callable[[EtcRun], EtcRun]
LEASE_S = 4


def node(tmp_path: Path, endpoints: str, slots: int, number: int = 2) -> EtcRun:
    return EtcRun(
        "--nnodes", "1:2", "--nproc-per-node", slots, "--rdzv-id", "job", "--rdzv-conf", f"lease_s={LEASE_S}",
        "--etcd-endpoints", endpoints, "--local-addr", f"127.0.0.{number}", "--parallel", "PP1TP1DP1",
        TINY_JOB, tmp_path, 100_000, 0.05, cwd=tmp_path,
    )


def last_step(folder: Path) -> int:
    return max(line["step"] for line in steps_of(folder))


@pytest.mark.long
def test_behind_an_etcd_with_half_a_second_of_round_trip_a_job_starts_and_scales(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    etcd = Etcd(etcd_server.endpoint, "job")
    with Wire(etcd_server.endpoint) as wire:
        wire.delay_s = 0.25  # each way
        job = cleanup(node(tmp_path, wire.endpoint, 2))
        wait_for_step(tmp_path, 3)
        etcd.scale("2")
        etcd.reply_to("2", "done")
        step = last_step(tmp_path)
        wait_for_step(tmp_path, step + 40)
        times = [line["time"] for line in steps_of(tmp_path) if line["rank"] == 0 and line["step"] > step]
        assert median(after - before for before, after in pairwise(times)) < 0.5, "no step waits for etcd"
        assert etcd.get("current")["committed"] == 2, "the lease held, and nothing else happened"
        job.send(signal.SIGTERM)
        assert job.wait() == 143


def test_a_job_whose_lease_is_lost_and_whose_events_are_compacted_trains_on_and_is_led_again(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    etcd = Etcd(etcd_server.endpoint, "job")
    with Wire(etcd_server.endpoint) as wire, EtcdClient([etcd_server.endpoint]) as client:
        job = cleanup(node(tmp_path, wire.endpoint, 2))
        wait_for_step(tmp_path, 3)
        wire.cut()
        wait_until(lambda: "/nodes/" not in " ".join(etcd.keys()), "the end of its lease")
        etcd.scale("2")
        client.compact(client.put("/elsewhere", ""))
        wait_for_more_steps(tmp_path, 20)
        wire.mend()
        etcd.reply_to("2", "done")
        wait_for_workers(tmp_path, 2)
        wait_until(lambda: etcd_leader(etcd) == "127.0.0.2", "its lead")
        assert etcd.get("current")["committed"] == 2
        steps = {line["step"] for line in steps_of(tmp_path)}
        assert steps == set(range(max(steps) + 1)), "no step was lost"
        assert len({line["pid"] for line in steps_of(tmp_path)}) == 2, "no worker was restarted"
        job.send(signal.SIGTERM)
        assert job.wait() == 143


def test_three_etcd_members_may_lose_their_leader_by_a_hang_or_a_crash_under_a_running_job(
    tmp_path: Path, cleanup: Cleanup
) -> None:
    with etcd_cluster(3) as servers:
        job = cleanup(node(tmp_path, ",".join(server.endpoint for server in servers), 2))
        wait_for_step(tmp_path, 3)
        hung = leader_of(servers)
        freeze(hung.pid)  # its connections stay open
        others = [server for server in servers if server is not hung]
        etcd = Etcd(leader_of(others).endpoint, "job")
        etcd.scale("2")
        etcd.reply_to("2", "done")
        wait_for_workers(tmp_path, 2)
        os.kill(hung.pid, signal.SIGCONT)
        wait_until(lambda: not is_leader(hung), "the etcd that hung to hear of the other leader")
        crashed = leader_of(others)
        crashed.kill()
        etcd = Etcd(leader_of([server for server in servers if server is not crashed]).endpoint, "job")
        etcd.scale("1")
        etcd.reply_to("1", "done")
        assert etcd.get("current")["committed"] == 3, "only what was asked for"
        assert len({line["pid"] for line in steps_of(tmp_path)}) == 2, "no worker was restarted"
        job.send(signal.SIGTERM)
        assert job.wait() == 143


def is_leader(server: EtcdServer) -> bool:
    with urllib.request.urlopen(f"http://{server.endpoint}/metrics", timeout=10) as answer:
        return re.search(rb"^etcd_server_is_leader 1$", answer.read(), re.MULTILINE) is not None


def leader_of(servers: list[EtcdServer]) -> EtcdServer:
    return wait_until(lambda: next(filter(is_leader, servers), None), "an etcd leader")


def fill(client: EtcdClient) -> None:
    for number in range(100):
        client.put(f"/filling/{number}", "x" * 500_000)


def test_an_etcd_that_is_full_is_told_of_once_and_the_job_goes_on_when_there_is_room(
    tmp_path: Path, cleanup: Cleanup
) -> None:
    with EtcdServer(extra_args=["--quota-backend-bytes=4000000"]) as server, EtcdClient([server.endpoint]) as client:
        etcd = Etcd(server.endpoint, "job")
        job = cleanup(node(tmp_path, server.endpoint, 1))
        wait_for_step(tmp_path, 3)
        with pytest.raises(EtcdError, match="is full"):
            fill(client)
        (worker,) = {line["pid"] for line in steps_of(tmp_path)}
        wait_for_more_steps(tmp_path, 20)
        os.kill(worker, signal.SIGKILL)  # its node tries to write that down from now on
        job.wait_for("an acknowledgement could not be written.* etcd is full")
        told = time.monotonic()
        wait_until(lambda: time.monotonic() - told > 3, "what else is said of it")  # not a wait: the span is looked at
        assert len([line for line in job.our_lines() if "acknowledgement" in line]) == 1
        assert len([line for line in job.our_lines() if "etcd is full" in line]) <= 4, job.output
        client.delete_prefix("/filling/")
        client.compact(client.get_prefix("/filling/")[1])
        etcd._etcdctl("defrag")
        etcd._etcdctl("alarm", "disarm")
        assert job.wait() == 137
