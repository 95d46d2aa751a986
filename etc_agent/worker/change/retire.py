"""Letting a generation go that is no longer in force: its groups, sockets, threads and memory, in the background."""

from __future__ import annotations

import gc
import logging
import threading
from dataclasses import dataclass

import torch.distributed as dist

from etc_agent.errors import one_line
from etc_agent.torch_private.imports import import_compiler
from etc_agent.worker.change.prepared import PreparedGeneration
from etc_agent.worker.live import LiveGeneration

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Retired:
    """What is left of a change. `old`: the generation that was left, None on a worker that joined, and where the change
    failed. `is_entered`: the prepared generation is in force, and only what the switch needed is left of it.

    `last_sends`: messages to workers that leave or have joined, still on their way over the change's group.
    """

    old: LiveGeneration | None
    prepared: PreparedGeneration
    last_sends: list[dist.Work]
    is_entered: bool = True


def spare_the_collector() -> None:
    """Let later garbage collections pass over what is there already: modules above all, some 300,000 objects.

    A generation that goes needs a full collection. It holds the interpreter lock, and would stop the first steps of
    the new generation for as long as it takes to visit every object.
    """
    # The first optimizer step would import this anyway, and it is the largest part.
    import_compiler()
    gc.collect()
    gc.freeze()


class Retirements:
    """Generations on their way out: what they hold counts as in use until it is freed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_left = 0

    def announce(self) -> None:
        """A generation is no longer in force; `retire` follows."""
        with self._changed:
            self._num_left += 1

    def retire(self, retired: Retired) -> None:
        """Free an announced one on a thread of its own; the caller keeps no reference to any part."""
        threading.Thread(target=self._retire, args=(retired,), name="etc-retire", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that were announced are freed; whether that is so in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_left, timeout_s)

    def _retire(self, retired: Retired) -> None:
        try:
            _let_go(retired)
        finally:
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()


def _let_go(retired: Retired) -> None:
    for work in retired.last_sends:
        try:
            work.wait()
        except RuntimeError as error:
            _log.info("a worker left before it was told to: %s", one_line(error))
    retired.last_sends.clear()
    if retired.old is not None:
        retired.old.world.close()
        retired.old = None
    if retired.is_entered:
        # The world in `next` is the one in force now: it stays.
        retired.prepared.next = None
    retired.prepared.close()
    del retired.prepared
    # Modules, schedules and hooks refer to each other in circles, and a kept group keeps its sockets and threads.
    gc.collect()
