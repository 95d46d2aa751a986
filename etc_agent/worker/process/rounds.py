"""``init_process_group``, ``destroy_process_group``, ``init_process_group`` ... in one process.

Each time, ``env://`` yields the same store of the agent, in which the keys of the process group before still are: a
rank that reads the address of a closed socket there waits for it in vain. In our workers each round has a key prefix.

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

_PREFIX = "etc-run/round"
# `etc_agent.control.channel.SOCKET_VARIABLE`; that module would cost every child of a worker that imports torch 15 ms.
_STARTED_BY_OUR_AGENT = "ETC_CONTROL_SOCKET"


class Rounds:
    """torch's rendezvous `original`, with a prefix for every round after this process's first.

    A round is over for a rank once all ranks have entered it, so that one that gave up waiting for the others tries
    the same round again.
    """

    def __init__(self, original: Rendezvous) -> None:
        self._original = original
        self._round = 0
        self._has_entered = False

    def __call__(self, url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
        for store, rank, world_size in self._original(url, **options):
            yield self._of_this_round(store, world_size), rank, world_size

    def _of_this_round(self, store: Store, world_size: int) -> Store:
        from torch.distributed import PrefixStore

        from etc_agent.worker.process.heartbeat import say_plain

        if self._has_entered and store.add(f"{_PREFIX}{self._round}", 0) >= world_size:
            self._round, self._has_entered = self._round + 1, False
        if not self._has_entered:
            store.add(f"{_PREFIX}{self._round}", 1)
            self._has_entered = True
            say_plain()
        return PrefixStore(f"{_PREFIX}{self._round}", store) if self._round else store


def install() -> None:
    """Have ``env://`` count its rounds, where this is a worker of our agent. A second call changes nothing."""
    if _STARTED_BY_OUR_AGENT not in os.environ:
        return
    try:
        from etc_agent.torch_private.rendezvous_handlers import wrap_env_handler
    except ImportError:  # a torch without distributed, or one that keeps its handlers elsewhere
        return
    wrap_env_handler(lambda handler: handler if isinstance(handler, Rounds) else Rounds(handler))
