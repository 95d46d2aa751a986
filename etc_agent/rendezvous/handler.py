"""The entry point of the group ``torchrun.handlers``: the rendezvous backend ``etcd-v3`` for plain torchrun.

torch loads every entry point of that group in each process that imports its rendezvous, whatever backend the job uses.
So this module imports nothing else until a job asks for this backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousHandlerCreator,
        RendezvousParameters,
    )


def entry_point() -> RendezvousHandlerCreator:
    """The function that makes a job's handler from torchrun's parameters."""
    return _create


def _create(params: RendezvousParameters) -> RendezvousHandler:
    from etc_agent.rendezvous.torchrun.handler import create_handler

    return create_handler(params)
