"""Numbers the default process groups that a script makes with ``env://``, one after the other, in one process.

``env://`` uses the agent's store for each of them, and the keys of the process group before are still in it: a rank
that reads the address of a closed socket there waits in vain. So in our workers each further group gets a key prefix.

torch calls `install` while it is imported (`etc_agent.agent.processes.torch_hook` says how), unless
``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` is set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store

    Rendezvous = Callable[..., Iterator[tuple[Store, int, int]]]

_PREFIX = "etc-run/group"
# `etc_agent.control.channel.SOCKET_VARIABLE`; that module would cost every child of a worker that imports torch 15 ms.
_STARTED_BY_OUR_AGENT = "ETC_CONTROL_SOCKET"


class NumberedRendezvous:
    """torch's rendezvous `original`, with a key prefix for every process group after this process's first.

    A rank uses the next number once all ranks have used the present one. So a rank that timed out waiting for the
    others tries again under the same number.
    """

    def __init__(self, original: Rendezvous) -> None:
        self._original = original
        self._number = 0
        self._has_entered = False

    def __call__(self, url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
        for store, rank, world_size in self._original(url, **options):
            yield self._with_prefix(store, world_size), rank, world_size

    def _with_prefix(self, store: Store, world_size: int) -> Store:
        from torch.distributed import PrefixStore

        from etc_agent.worker.process.heartbeat import say_plain

        if self._has_entered and store.add(f"{_PREFIX}{self._number}", 0) >= world_size:
            self._number, self._has_entered = self._number + 1, False
        if not self._has_entered:
            store.add(f"{_PREFIX}{self._number}", 1)
            self._has_entered = True
            say_plain()
        return PrefixStore(f"{_PREFIX}{self._number}", store) if self._number else store


def install() -> None:
    """Have ``env://`` number its process groups, where this is a worker of our agent. A second call changes nothing."""
    if _STARTED_BY_OUR_AGENT not in os.environ:
        return
    try:
        from etc_agent.torch_private.rendezvous_handlers import wrap_env_handler
    except ImportError:  # a torch without distributed, or one that keeps its handlers elsewhere
        return
    wrap_env_handler(lambda handler: handler if isinstance(handler, NumberedRendezvous) else
    NumberedRendezvous(handler))
