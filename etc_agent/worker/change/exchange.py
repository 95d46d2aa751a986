"""JSON values over a raw gloo group: broadcast and all-gather, without pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def broadcast_json(group: dist.ProcessGroup, source: int, value: Any) -> Any:
    """`value` of worker `source`, on every worker; what the others pass is ignored.

    Raises:
        RuntimeError: a worker was lost, or did not come in time.
    """
    payload = _encode(value) if group.rank() == source else torch.empty(0, dtype=torch.uint8, device="cpu")
    size = torch.tensor([payload.numel()], dtype=torch.int64, device="cpu")
    group.broadcast(size, source).wait()
    if group.rank() != source:
        payload = torch.empty(int(size.item()), dtype=torch.uint8, device="cpu")
    group.broadcast(payload, source).wait()
    return _decode(payload)


def gather_json(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Every worker's `value`, in worker order, on every worker.

    Raises:
        RuntimeError: a worker was lost, or did not come in time.
    """
    payload = _encode(value)
    sizes = _gather(group, torch.tensor([payload.numel()], dtype=torch.int64, device="cpu"))
    lengths = [int(size.item()) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: payload.numel()] = payload
    return [_decode(row[:length]) for row, length in zip(_gather(group, padded), lengths, strict=True)]


def _gather(group: dist.ProcessGroup, tensor: torch.Tensor) -> list[torch.Tensor]:
    rows = [torch.empty_like(tensor) for _ in range(group.size())]
    group.allgather([rows], [tensor]).wait()
    return rows


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8)


def _decode(payload: torch.Tensor) -> Any:
    return json.loads(payload.numpy().tobytes())
