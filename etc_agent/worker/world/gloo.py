"""gloo groups that know their connections.

The ranks of a group tell each other on which ports they listen as soon as the group is made. So every group that
torch.distributed makes in a world, by the session, by `build` or by the script, can be cut.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from etc_agent.torch_private.gloo_groups import make_devices, make_groups_of, options_of
from etc_agent.worker.world.connections import Connections
from etc_agent.worker.world.swap import present_connections
from etc_agent.worker.world.waits import noted

_ROW_BYTES: Final = 512
_MOST_ENDPOINTS: Final = 8
"""Interfaces of one rank that are told; each takes up to 50 bytes of a row."""
_DEFAULT_TIMEOUT: Final = timedelta(seconds=1800)


class RecordedGloo(dist.ProcessGroupGloo):
    """A gloo backend whose connections are noted in `connections`: by default those of the calling thread's world.
    Collective over its ranks."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta = _DEFAULT_TIMEOUT,
        connections: Connections | None = None,
    ) -> None:
        connections = connections or present_connections()
        self._waits = connections.waits
        own, devices = connections.listen(make_devices)
        super().__init__(store, rank, size, options_of(devices, timeout))
        if size > 1:
            row = json.dumps(own[:_MOST_ENDPOINTS]).encode().ljust(_ROW_BYTES)
            rows = [torch.empty(_ROW_BYTES, dtype=torch.uint8, device="cpu") for _ in range(size)]
            # Also opens the connections that the first collective needs.
            mine = torch.frombuffer(bytearray(row), dtype=torch.uint8)
            cast(Any, self).allgather([rows], [mine]).wait()
            connections.learn((host, port) for each in rows for host, port in json.loads(each.numpy().tobytes()))

    # PyTorch's own groups call the backend in C++; their works are those of the calling thread's world.

    def allreduce(self, *args: Any) -> dist.Work:
        return noted(cast(Any, super()).allreduce(*args), self._waits)

    def allgather(self, *args: Any) -> dist.Work:
        return noted(cast(Any, super()).allgather(*args), self._waits)

    def broadcast(self, *args: Any) -> dist.Work:
        return noted(cast(Any, super()).broadcast(*args), self._waits)

    def send(self, *args: Any) -> dist.Work:
        return noted(cast(Any, super()).send(*args), self._waits)

    def recv(self, *args: Any) -> dist.Work:
        return noted(cast(Any, super()).recv(*args), self._waits)


def record_groups() -> None:
    """From now on the connections of every gloo group are noted in its world."""
    make_groups_of(RecordedGloo)
