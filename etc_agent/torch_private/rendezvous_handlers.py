"""PyTorch's table of how ``init_process_group`` finds its store, by the scheme of ``init_method``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed import Store
from torch.distributed.rendezvous import _rendezvous_handlers

NAMES = ("torch.distributed.rendezvous._rendezvous_handlers",)

Rendezvous = Callable[..., Iterator[tuple[Store, int, int]]]


def wrap_env_handler(wrap: Callable[[Any], Rendezvous]) -> None:
    """Put ``wrap(handler)`` in place of the handler of ``env://``. `register_rendezvous_handler` refuses to."""
    _rendezvous_handlers["env"] = wrap(_rendezvous_handlers["env"])
