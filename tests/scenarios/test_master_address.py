"""Rank 0 moves from node to node, and nobody is left with the address of the one before."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from running import EtcRun, wait_until

from etc_agent.rendezvous.private.server import EtcdServer

Cleanup = Callable[[EtcRun], EtcRun]

SCRIPT = """
import json, os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
ranks = [None] * dist.get_world_size()
dist.all_gather_object(ranks, os.environ["RANK"])
with open(f"{sys.argv[1]}/met-{os.getpid()}", "w") as file:
    json.dump({"ranks": ranks, "rank": os.environ["RANK"], "master": os.environ["MASTER_ADDR"]}, file)
time.sleep(600)
"""


def test_a_plain_script_meets_at_rank_0_whether_that_is_a_newcomer_or_the_one_that_is_left(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    script = tmp_path / "meet.py"
    script.write_text(SCRIPT)

    def node(number: int, rank: int) -> EtcRun:
        return cleanup(EtcRun(
            "--nnodes", "1:2", "--nproc-per-node", 1, "--rdzv-id", "job", "--rdzv-conf", "lease_s=3,start_s=1",
            "--node-rank", rank, "--etcd-endpoints", etcd_server.endpoint, "--local-addr", f"127.0.0.{number}",
            script, tmp_path, cwd=tmp_path,
        ))  # fmt: skip

    def met() -> list[dict[str, Any]]:
        files = sorted(tmp_path.glob("met-*"), key=lambda file: file.stat().st_mtime)
        return [json.loads(text) for file in files if (text := file.read_text()).endswith("}")]

    first = node(2, rank=1)
    wait_until(lambda: len(met()) == 1, "the first to meet itself")
    newcomer = node(3, rank=0)  # sorts before it
    wait_until(lambda: len(met()) == 3, "two that met")
    assert [one["master"] for one in met()] == ["127.0.0.2", "127.0.0.3", "127.0.0.3"]
    assert all(one["ranks"] == ["0", "1"] for one in met()[1:])
    newcomer.send(signal.SIGKILL)
    newcomer.wait()
    wait_until(lambda: len(met()) == 4, "the one that is left")
    assert met()[-1] == {"ranks": ["0"], "rank": "0", "master": "127.0.0.2"}
    first.send(signal.SIGTERM)
    assert first.wait() == 143
    first.assert_nothing_left()
