"""Private parts of DistributedDataParallel."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

NAMES = ("torch.nn.parallel.DistributedDataParallel._sync_buffers",)


def sync_buffers(model: DistributedDataParallel) -> None:
    """Give the buffers the values of rank 0 of the model's group, as a forward pass in training begins with.

    Collective over that group. Does nothing with ``broadcast_buffers=False``, or where there are no buffers.
    """
    if model.broadcast_buffers and model.modules_buffers:
        model._sync_buffers()
