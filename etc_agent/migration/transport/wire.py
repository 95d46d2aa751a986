"""Point-to-point over a raw c10d backend: flat uint8 tensors to and from workers, by tag.

gloo moves host memory only, so tensors on a GPU pass through pinned staging buffers. NCCL moves device memory; all
operations of a round are launched as one NCCL group, so that no two workers can deadlock (not yet run on more than one
GPU).
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from etc_agent.migration.transport.bells import Bells, Rung
from etc_agent.torch_private.backends import one_launch

_FIRST_TAG = 1 << 30
"""The group may be the script's own, or used by the session too: their messages have tags below this."""

Operation = tuple[int, int, torch.Tensor | None]
"""Peer, tag, and the flat uint8 tensor to send or to receive into. None instead of a tensor where both ends share
memory: then only the bell is rung or waited for."""


class Work(Protocol):
    """An operation in flight."""

    def wait(self, timeout: datetime.timedelta) -> bool: ...


class _FailedWork:
    """An operation that could not be started because a peer is known to be gone. Waiting for it raises the error."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: datetime.timedelta) -> bool:
        raise self._error


class _Done:
    """An operation that is already complete."""

    def wait(self, timeout: datetime.timedelta) -> bool:
        return True


def _start(post: Callable[[list[torch.Tensor], int, int], Work], peer: int, tag: int, buffer: torch.Tensor) -> Work:
    try:
        return post([buffer], peer, tag)
    except RuntimeError as error:
        return _FailedWork(error)


class Wire:
    """The operations that a migration needs of a process group whose ranks are the plan's worker numbers.

    Args:
        group: a raw backend (`ProcessGroupGloo`, `ProcessGroupNCCL`) or a `ProcessGroup` around one.

    Attributes:
        bells: of the peers that this worker shares memory with.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.bells = Bells(())
        self.is_nccl = "nccl" in str(group.name()).lower()

    def close(self) -> None:
        """Drop the group, whose sockets live as long as anything refers to it, and close the bells."""
        self.bells.close()
        self._group = None

    @property
    def size(self) -> int:
        return int(self._group.size())

    @property
    def rank(self) -> int:
        return int(self._group.rank())

    @property
    def device(self) -> torch.device:
        """Where the wire reads and writes."""
        return torch.device("cuda", torch.cuda.current_device()) if self.is_nccl else torch.device("cpu")

    def post(self, receives: Sequence[Operation], sends: Iterable[Operation]) -> tuple[list[Work], list[Work]]:
        """Start receives and sends without waiting for any. An operation that cannot be started fails when waited for.

        Args:
            sends: an iterator may pack each message when it is asked for it; with gloo the earlier ones are sent
                meanwhile.

        Returns:
            The work of each receive and of each send, in order.
        """
        if self.is_nccl:
            return self._post_grouped(receives, list(sends))
        # Receives first: gloo sends at once where the receiver is already waiting.
        received = [self._receive(*operation) for operation in receives]
        return received, [self._send(*operation) for operation in sends]

    def _receive(self, peer: int, tag: int, buffer: torch.Tensor | None) -> Work:
        if buffer is None:
            return Rung(self.bells, peer, tag)
        return _start(self._group.recv, peer, _FIRST_TAG + tag, buffer)

    def _send(self, peer: int, tag: int, buffer: torch.Tensor | None) -> Work:
        if buffer is not None:
            return _start(self._group.send, peer, _FIRST_TAG + tag, buffer)
        try:
            self.bells.ring(peer, tag)
        except RuntimeError as error:
            return _FailedWork(error)
        return _Done()

    def _post_grouped(self, receives: Sequence[Operation], sends: Sequence[Operation]) -> tuple[list[Work], list[Work]]:
        """Launch all operations as one group. Launched separately, receives would block sends across workers. NCCL has
        no tags: within a pair, operations match in the order posted, which both ends derive from the same plan."""
        if not receives and not sends:
            return [], []
        works: list[Work] = []
        with one_launch(self._group, works):
            for peer, tag, buffer in receives:
                self._group.recv([buffer], peer, tag)
            for peer, tag, buffer in sends:
                self._group.send([buffer], peer, tag)
        (work,) = works
        return [work] * len(receives), [work] * len(sends)

    def all_gather(self, row: torch.Tensor, timeout: datetime.timedelta) -> list[torch.Tensor]:
        """The equally shaped `row` of every worker, in worker order."""
        rows = [torch.empty_like(row) for _ in range(self.size)]
        self._group.allgather([rows], [row]).wait(timeout)
        return rows

    def maximum(self, values: Sequence[int], timeout: datetime.timedelta) -> list[int]:
        """The largest of each of `values` over all workers."""
        numbers = torch.tensor([int(value) for value in values], dtype=torch.int64, device=self.device)
        self._reduce(numbers, dist.ReduceOp.MAX, timeout)
        return [int(number) for number in numbers.tolist()]

    def total(self, numbers: torch.Tensor, timeout: datetime.timedelta) -> torch.Tensor:
        """The sum of an equally shaped tensor over all workers, in place."""
        self._reduce(numbers, dist.ReduceOp.SUM, timeout)
        return numbers

    def _reduce(self, numbers: torch.Tensor, operation: Any, timeout: datetime.timedelta) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(operation)
        self._group.allreduce([numbers], options).wait(timeout)

    def broadcast_bytes(self, source: int, mine: bytes, timeout: datetime.timedelta) -> bytes:
        """The byte string of worker `source`, on every worker; what the others pass is ignored."""
        (size,) = self.maximum([len(mine) if self.rank == source else 0], timeout)
        row = torch.zeros(size, dtype=torch.uint8)
        if self.rank == source and mine:
            row[:] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        return self.total(row.to(self.device), timeout).cpu().numpy().tobytes() if size else b""

    def gather_bytes(self, mine: bytes, timeout: datetime.timedelta) -> list[bytes]:
        """The byte strings of all workers, of any length, in worker order."""
        sizes = self.all_gather(torch.tensor([len(mine)], device=self.device), timeout)
        lengths = [int(size.item()) for size in sizes]
        row = torch.zeros(max(lengths), dtype=torch.uint8)
        row[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        rows = self.all_gather(row.to(self.device), timeout)
        return [bytes(theirs[:length].cpu().numpy()) for theirs, length in zip(rows, lengths, strict=True)]


def first_line(error: BaseException) -> str:
    """The message of a c10d error without its C++ stack."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
