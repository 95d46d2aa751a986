"""The tiny model under torchft: one replica, or the lighthouse. Runs in an environment that has torchft.

    tiny_torchft.py lighthouse            prints its address and stays
    tiny_torchft.py ADDRESS NUMBER LOG    the replica of that number; appends a JSON line per committed step to LOG
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from recovery.tiny_model import GLOBAL_BATCH, loss_of, make_model, samples

JOIN_MS, HEARTBEAT_MS, TICK_MS = 300, 1000, 20
"""How long a quorum waits for members that are slow to ask, and after which silence a replica counts as lost."""


def lighthouse() -> None:
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=JOIN_MS, quorum_tick_ms=TICK_MS,
        heartbeat_timeout_ms=HEARTBEAT_MS,
    )
    print(server.address(), flush=True)
    time.sleep(1e6)


def replica(address: str, number: str, log: Path) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = {"model": model, "optimizer": inner}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)), min_replica_size=1, rank=0, world_size=1,
        load_state_dict=lambda state: [parts[name].load_state_dict(value) for name, value in state.items()],
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        replica_id=f"tiny-{number}", lighthouse_addr=address, store_addr="127.0.0.1", store_port=store.port,
        hostname="127.0.0.1", timeout=timedelta(seconds=20),
    )
    optimizer = Optimizer(manager, inner)
    with log.open("a", buffering=1) as file:
        while True:
            before = manager.current_step()
            optimizer.zero_grad()
            count, rank = max(manager.num_participants(), 1), manager.participating_rank() or 0
            share = GLOBAL_BATCH // count
            first = before * GLOBAL_BATCH + rank * share
            loss_of(model, samples(range(first, first + share))).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                manager.allreduce(parameter.grad).wait()
            optimizer.step()
            if manager.current_step() > before:
                line = {"step": before, "time": time.time(), "participants": count, "pid": os.getpid()}
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    lighthouse() if sys.argv[1] == "lighthouse" else replica(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
