"""Whatever dies is noticed soon, and the right thing follows. Leases have their default length here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from running import (
    TINY_JOB,
    Etcd,
    EtcRun,
    etcd_leader,
    marked,
    steps_of,
    wait_for_more_steps,
    wait_for_workers,
    wait_until,
)

from etc_agent.rendezvous.private.server import EtcdServer

Cleanup = Callable[[EtcRun], EtcRun]
BELIEVED_S = 5.0
"""Much less than a lease, much more than the guardian needs on a busy machine."""


def node(tmp_path: Path, server: EtcdServer, number: int) -> EtcRun:
    return EtcRun(
        "--nnodes", "1:3", "--nproc-per-node", 1, "--rdzv-id", "job", "--etcd-endpoints", server.endpoint,
        "--local-addr", f"127.0.0.{number}", TINY_JOB, tmp_path, 100_000, 0.05, cwd=tmp_path,
    )


def two_nodes(tmp_path: Path, cleanup: Cleanup, server: EtcdServer) -> dict[str, EtcRun]:
    nodes = {f"127.0.0.{number}": cleanup(node(tmp_path, server, number)) for number in (2, 3)}
    etcd = Etcd(server.endpoint, "job")
    wait_until(lambda: len((etcd.get("status") or {}).get("nodes", ())) == 2, "two nodes")
    wait_for_workers(tmp_path, 2)
    return nodes


@pytest.mark.parametrize("is_leader", [True, False], ids=["the leader", "another"])
def test_an_agent_that_is_killed_alone_is_replaced_long_before_its_lease_ends(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer, *, is_leader: bool
) -> None:
    nodes = two_nodes(tmp_path, cleanup, etcd_server)
    leader = etcd_leader(Etcd(etcd_server.endpoint, "job"))
    (victim,) = (run for name, run in nodes.items() if (name == leader) == is_leader)
    (other,) = (run for run in nodes.values() if run is not victim)
    killed_at = time.monotonic()
    victim.send(signal.SIGKILL)
    other.wait_for(r"node \S+ was lost", 40)
    assert time.monotonic() - killed_at < BELIEVED_S
    wait_for_more_steps(tmp_path, 5)
    assert len({line["pid"] for line in steps_of(tmp_path)}) == 2, "the survivor is the same process"
    wait_until(lambda: "its workers have ended, and the other nodes know" in victim.output, "the testimony", 10.0)
    victim.assert_nothing_left()


@pytest.mark.parametrize(
    "is_whole_tree", [False, pytest.param(True, marks=pytest.mark.long)],
    ids=["with its guardian", "with all that it started"],
)
def test_where_nobody_is_left_to_testify_the_lease_has_to_run_out(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer, *, is_whole_tree: bool
) -> None:
    victim, other = two_nodes(tmp_path, cleanup, etcd_server).values()
    doomed = [pid for pid, command in marked(victim.mark) if is_whole_tree or "guardian_process" in command]
    assert doomed
    killed_at = time.monotonic()
    for pid in (*doomed, victim.process.pid):
        os.kill(pid, signal.SIGKILL)
    other.wait_for(r"lost the connection to a peer, .*; perhaps node \S+ is lost", 40)
    other.wait_for(r"node \S+ was lost", 40)
    assert time.monotonic() - killed_at > BELIEVED_S
