"""Sending pieces, and summing them (XOR) where they arrive, in messages of bounded size."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist

_MESSAGE_BYTES: Final = 4 << 20
"""Of what is summed, only so much is in memory beside the sum."""


def send(group: dist.ProcessGroup, piece: torch.Tensor, to: int, tag: int) -> list[Any]:
    """Send the flat uint8 `piece`, which must not change before all that is returned has been waited for."""
    return [group.send([message], to, tag) for message in piece.split(_MESSAGE_BYTES)]


def receive(group: dist.ProcessGroup, into: torch.Tensor, source: int, tag: int) -> None:
    """Receive a piece of the same length.

    Raises:
        RuntimeError: the sender was lost.
    """
    for message in into.split(_MESSAGE_BYTES):
        group.recv([message], source, tag).wait()


def receive_onto(group: dist.ProcessGroup, total: torch.Tensor, source: int, tag: int) -> None:
    """Receive a piece of the same length, and XOR it onto `total`: flat uint8, a multiple of 16 bytes from an aligned
    address.

    Raises:
        RuntimeError: the sender was lost.
    """
    received = torch.empty(min(_MESSAGE_BYTES, total.numel()), dtype=torch.uint8, device="cpu")
    for part in total.split(_MESSAGE_BYTES):
        message = received[: part.numel()]
        group.recv([message], source, tag).wait()
        words = part.view(torch.int64)
        words.bitwise_xor_(message.view(torch.int64))
