"""Hashes of boxes, to prove that what arrived is what left."""

from __future__ import annotations

import ctypes
import hashlib
from collections import defaultdict
from collections.abc import Callable

import torch

from etc_agent.migration.check import describe
from etc_agent.migration.errors import MigrationError
from etc_agent.migration.memory.bits import as_bits
from etc_agent.migration.transport.wire import Wire, Work
from etc_agent.planner.transfers.plan import Transfer

_TAG = (1 << 30) - 1
_HASH_BYTES = 8


def box_hash(view: torch.Tensor) -> bytes:
    """BLAKE2b of a tensor's bits in row-major order, `_HASH_BYTES` long; strides and device do not matter."""
    flat = as_bits(view).contiguous().reshape(-1).view(torch.uint8).cpu()
    # Not through numpy, which would make the storage one that cannot be resized, and so not be freed.
    memory = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr()) if flat.numel() else b""
    return hashlib.blake2b(memory, digest_size=_HASH_BYTES).digest()


class BoxHashes:
    """What one worker has sent and received, by peer, in the order of the plan."""

    def __init__(self) -> None:
        self._sent: dict[int, list[bytes]] = defaultdict(list)
        self._received: dict[int, list[tuple[Transfer, bytes]]] = defaultdict(list)

    def sending(self, transfer: Transfer, view: torch.Tensor) -> None:
        self._sent[transfer.target].append(box_hash(view))

    def received(self, transfer: Transfer, view: torch.Tensor) -> None:
        self._received[transfer.source].append((transfer, box_hash(view)))

    def compare(self, worker: int, wire: Wire, wait_for: Callable[[Work, str], None]) -> None:
        """Exchange hashes with every peer.

        Raises:
            MigrationError: a box differs from what its sender sent; the message names it.
        """
        device = wire.device
        outgoing = {p: torch.frombuffer(bytearray(b"".join(h)), dtype=torch.uint8) for p, h in self._sent.items()}
        incoming = {
            p: torch.empty(len(h) * _HASH_BYTES, dtype=torch.uint8, device=device) for p, h in self._received.items()
        }
        received, sent = wire.post(
            [(peer, _TAG, buffer) for peer, buffer in incoming.items()],
            [(peer, _TAG, buffer.to(device)) for peer, buffer in outgoing.items()],
        )
        for peer, work in zip((*incoming, *outgoing), (*received, *sent), strict=True):
            wait_for(work, f"exchanging hashes with worker {peer}")
        for peer, buffer in incoming.items():
            theirs = bytes(buffer.tolist())
            for index, (transfer, mine) in enumerate(self._received[peer]):
                if theirs[index * _HASH_BYTES : (index + 1) * _HASH_BYTES] != mine:
                    raise MigrationError(
                        f"worker {worker}: {describe(transfer.tensor, transfer.box)} from worker {peer} arrived "
                        f"damaged: its hash differs from the sender's"
                    )
