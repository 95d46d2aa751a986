"""A node loses its path to etcd and nothing else: no two generations train at once, and the job goes on elsewhere.

Both nodes are on this machine and reach each other all the time. The proxy between the first one and etcd dies.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from running import EtcRun, wait_until

from etc_agent.rendezvous.private.server import EtcdServer
from tests.rendezvous.etcd_helpers import Wire

Cleanup = Callable[[EtcRun], EtcRun]
LEASE_S = 4
SCRIPT = """
import os, pathlib, sys, time
begin, partial = time.time(), pathlib.Path(f"{sys.argv[1]}/partial-{os.getpid()}")
while True:
    partial.write_text(f"{begin} {time.time()}")
    partial.rename(f"{sys.argv[1]}/life-{os.environ['NODE']}-{os.getpid()}")
    time.sleep(0.05)
"""
"""It has no session and needs nobody. Its file says from when to when it was there, and on which node."""


class Life(NamedTuple):
    node: str
    begin: float
    last: float


def node(tmp_path: Path, name: str, number: int, endpoint: str) -> EtcRun:
    script = tmp_path / "endless.py"
    script.write_text(SCRIPT)
    return EtcRun(
        "--nnodes", "1:1", "--nproc-per-node", 1, "--rdzv-id", "job", "--rdzv-conf", f"lease_s={LEASE_S},start_s=1",
        "--etcd-endpoints", endpoint, "--local-addr", f"127.0.0.{number}", script, tmp_path, cwd=tmp_path,
        environment={"NODE": name},
    )


def lives(tmp_path: Path) -> list[Life]:
    return [
        Life(path.name.split("-")[1], *map(float, path.read_text().split())) for path in tmp_path.glob("life-*")
    ]


def grows(tmp_path: Path, name: str) -> bool:
    return any(time.time() - life.last < 0.5 for life in lives(tmp_path) if life.node == name)


@pytest.mark.parametrize("spare_comes", ["before", "soon after", "long after"])
def test_a_job_whose_node_loses_etcd_goes_on_on_another_node_when_no_worker_is_left_on_the_first(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer, spare_comes: str
) -> None:
    def spare() -> EtcRun:
        return cleanup(node(tmp_path, "b", 3, etcd_server.endpoint))

    with Wire(etcd_server.endpoint) as wire:
        runs = [cleanup(node(tmp_path, "a", 2, wire.endpoint))]
        wait_until(lambda: grows(tmp_path, "a"), "a worker on node a")
        if spare_comes == "before":
            runs.append(spare())
            runs[1].wait_for("a waiting node, without workers")
        wire.cut()
        if spare_comes == "soon after":
            runs.append(spare())
        elif spare_comes == "long after":
            cut_at = time.monotonic()
            wait_until(lambda: time.monotonic() > cut_at + 2 * LEASE_S, "the lease to be over")
            assert grows(tmp_path, "a"), "as far as node a knows, nobody could take over"
            runs.append(spare())
        wait_until(lambda: grows(tmp_path, "b"), "a worker on node b")
        wait_until(lambda: not grows(tmp_path, "a"), "no worker on node a")
        last = max(life.last for life in lives(tmp_path) if life.node == "a")
        first = min(life.begin for life in lives(tmp_path) if life.node == "b")
        assert last < first, "two generations trained at once"
        runs[0].wait_for("node .* hears it: its workers are stopped")
        wire.mend()
        for run in runs:
            run.send(signal.SIGTERM)
        for run in runs:
            run.wait()
            run.assert_nothing_left()
