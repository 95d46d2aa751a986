"""Nodes of one job that were started with different command lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from running import EtcRun

Cleanup = Callable[[EtcRun], EtcRun]

SHOW = """
import json, os, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(())
dist.all_reduce(total)
names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
print(json.dumps({"argv": sys.argv[1:], "total": int(total), **{name: os.environ[name] for name in names}}), flush=True)
dist.barrier()  # a rank that ended earlier could take its last messages with it
dist.destroy_process_group()
"""


def test_nodes_with_their_own_slots_arguments_and_roles_make_up_one_job(
    tmp_path: Path, cleanup: Cleanup, etcd_server: Any
) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    common = ("--nnodes", 2, "--rdzv-id", "job", "--etcd-endpoints", etcd_server.endpoint)
    nodes = [
        cleanup(EtcRun(
            *common, "--local-addr", f"127.0.0.{idx}", "--node-rank", idx - 1, "--nproc-per-node", slots,
            "--role", role, script, "--idx", idx, cwd=tmp_path,
        ))
        for idx, slots, role in ((1, 1, "reader"), (2, 3, "trainer"))
    ]
    assert [node.wait() for node in nodes] == [0, 0]
    shown = [json.loads(line) for node in nodes for line in node.lines if line.startswith("{")]
    assert [worker["argv"] for worker in shown] == [["--idx", "1"]] + 3 * [["--idx", "2"]]
    assert {(worker["total"], worker["WORLD_SIZE"]) for worker in shown} == {(4, "4")}
    columns = ("RANK", "LOCAL_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
    assert sorted(tuple(worker[name] for name in columns) for worker in shown) == [
        ("0", "1", "reader", "0", "1"),
        ("1", "3", "trainer", "0", "3"),
        ("2", "3", "trainer", "1", "3"),
        ("3", "3", "trainer", "2", "3"),
    ]
