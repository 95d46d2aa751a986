"""From messages to memory: which bytes of which tensor a message carries, in place or through a staging buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from etc_agent.migration.memory.bits import as_bits, as_bytes, bits_at
from etc_agent.migration.schedule import Message, Round, aligned
from etc_agent.planner.transfers.plan import Refer, Transfer
from etc_agent.state.layout import Shard

TensorOf = Callable[[Shard], torch.Tensor]
"""The local tensor of a shard."""


class SharedPlaces(Protocol):
    """Where the boxes of shared messages lie in memory that both ends have mapped, as integer tensors (`bits`)."""

    def outgoing(self, message: Message) -> tuple[torch.Tensor, ...]:
        """Where this worker writes the boxes of `message`."""

    def incoming(self, message: Message) -> tuple[torch.Tensor, ...]:
        """Where this worker reads the boxes of `message`; empty if they are already in their tensors."""


@dataclass(frozen=True, slots=True)
class BoundMessage:
    """The flat bytes that the wire moves (none for a shared message), and the copies to make before a send or after a
    receive, as pairs of integer tensors."""

    message: Message
    buffer: torch.Tensor | None
    copy_to: tuple[torch.Tensor, ...] = ()
    copy_from: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class BoundRound:
    sends: tuple[BoundMessage, ...]
    receives: tuple[BoundMessage, ...]


@dataclass(frozen=True, slots=True)
class LocalCopies:
    """Boxes that stay on this worker but have to be copied to another place, as pairs of integer tensors."""

    copy_to: tuple[torch.Tensor, ...]
    copy_from: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Binder:
    """Finds the memory of messages.

    Args:
        source, target: the local tensors of old and new shards.
        wire_device: type of the devices whose memory the wire takes as it is.
        shared: tells where shared messages lie.
    """

    source: TensorOf
    target: TensorOf
    wire_device: str
    shared: SharedPlaces | None = None

    def staging_need_bytes(self, scheduled: Round) -> int:
        """Staging bytes that a round needs."""
        staged = [m for m in scheduled.sends if not m.shared and self._in_place(m, self.source_view) is None]
        staged += [m for m in scheduled.receives if not m.shared and self._in_place(m, self.target_view) is None]
        return sum(aligned(message.num_bytes) for message in staged)

    def bind(self, scheduled: Round, slot: torch.Tensor) -> BoundRound:
        """The memory of one round's messages. `slot` is a flat uint8 buffer of at least `staging_need_bytes`."""
        used = 0

        def staged(message: Message) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
            nonlocal used
            buffer = slot[used : used + message.num_bytes]
            used += aligned(message.num_bytes)
            items = zip(message.starts_bytes, message.transfers, strict=True)
            return buffer, tuple(bits_at(buffer, start, t.box.shape, t.tensor.itemsize) for start, t in items)

        sends, receives = [], []
        for message in scheduled.sends:
            if message.shared:
                assert self.shared is not None
                items = self.shared.outgoing(message)
                sends.append(BoundMessage(message, None, items, _bits(message.transfers, self.source_view)))
                continue
            in_place = self._in_place(message, self.source_view)
            if in_place is not None:
                sends.append(BoundMessage(message, in_place))
            else:
                buffer, items = staged(message)
                sends.append(BoundMessage(message, buffer, items, _bits(message.transfers, self.source_view)))
        for message in scheduled.receives:
            if message.shared:
                assert self.shared is not None
                items = self.shared.incoming(message)
                targets = _bits(message.transfers, self.target_view) if items else ()
                receives.append(BoundMessage(message, None, targets, items))
                continue
            in_place = self._in_place(message, self.target_view)
            if in_place is not None:
                receives.append(BoundMessage(message, in_place))
            else:
                buffer, items = staged(message)
                receives.append(BoundMessage(message, buffer, _bits(message.transfers, self.target_view), items))
        return BoundRound(tuple(sends), tuple(receives))

    def bind_local(self, refers: Sequence[Refer]) -> LocalCopies:
        """The copies that `refers` need. A new shard that keeps the memory of its old one needs none."""
        copy_to, copy_from = [], []
        for refer in refers:
            source = self.source(Shard(refer.tensor, refer.source_box))[refer.box.within(refer.source_box)]
            target = self.target(Shard(refer.tensor, refer.target_box))[refer.box.within(refer.target_box)]
            if source.numel() and not same_memory(source, target):
                copy_to.append(as_bits(target))
                copy_from.append(as_bits(source))
        return LocalCopies(tuple(copy_to), tuple(copy_from))

    def _moves(self, view: torch.Tensor) -> bool:
        # A new tensor that has no memory yet (meta) will be on the same device as the old ones.
        return view.device.type in (self.wire_device, "meta")

    def source_view(self, transfer: Transfer) -> torch.Tensor:
        holder = self.target if transfer.forwarded else self.source
        return holder(Shard(transfer.tensor, transfer.source_box))[transfer.box.within(transfer.source_box)]

    def target_view(self, transfer: Transfer) -> torch.Tensor:
        return self.target(Shard(transfer.tensor, transfer.target_box))[transfer.box.within(transfer.target_box)]

    def _in_place(self, message: Message, view_of: Callable[[Transfer], torch.Tensor]) -> torch.Tensor | None:
        if len(message.transfers) > 1:
            return None
        view = view_of(message.transfers[0])
        return as_bytes(view) if view.is_contiguous() and self._moves(view) else None


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same address, shape, strides and dtype."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.device == other.device
    )


def _bits(transfers: Sequence[Transfer], view_of: Callable[[Transfer], torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(as_bits(view_of(transfer)) for transfer in transfers)
