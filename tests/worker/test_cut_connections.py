"""Cutting the connections of a gloo group whose ranks all live frees every rank, whatever it was sending."""

from __future__ import annotations

import threading
from pathlib import Path

import torch.distributed as dist
from mini_agent import run_script

ROUNDS = 12

RANK = """
import os, threading, time
import torch, torch.distributed as dist
from etc_agent.worker.world.connections import Connections
from etc_agent.worker.world.stores import raw_group

torch.set_num_threads(1)
rank, store = int(os.environ["RANK"]), dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
freed = 0
for number in range(int(os.environ["ROUNDS"])):
    connections = Connections()
    group = raw_group(dist.PrefixStore(f"group{number}", store), rank, 2, 8.0, connections)
    values, is_under_way, errors = torch.ones(10_000), threading.Event(), []

    def reduce():
        try:
            while True:
                group.allreduce([values]).wait()
                is_under_way.set()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=reduce)
    thread.start()
    is_under_way.wait()
    began = time.monotonic()
    connections.cut()
    thread.join()
    freed += time.monotonic() - began < 6.0
print("freed", freed)
"""


def test_no_rank_of_a_group_that_is_cut_in_the_middle_of_a_collective_sits_out_its_timeout(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    written: dict[int, str] = {}

    def run(rank: int) -> None:
        environment = {"RANK": str(rank), "MASTER_PORT": str(store.port), "ROUNDS": str(ROUNDS)}
        written[rank] = run_script(RANK, tmp_path / f"log-{rank}", environment, timeout_s=200.0)[1]

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert {text.splitlines()[-1] for text in written.values()} == {f"freed {ROUNDS}"}, written
