"""The end of a switch for workers that leave: if one exited early, the vote's last messages could be lost with it.

So every worker confirms to each leaving worker that it has seen the vote, and a leaving worker waits for all of them.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from etc_agent.errors import one_line
from etc_agent.worker.change.prepared import PreparedGeneration

_log = logging.getLogger(__name__)

_SEEN_TAG = 1


def tell_leavers(prepared: PreparedGeneration) -> list[dist.Work]:
    """Send the confirmation to those that leave; returns the sends, to be waited for before the group is closed."""
    byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
    others = (leaver for leaver in prepared.crew.leaving if leaver != prepared.crew.worker)
    sends = []
    for leaver in others:
        try:
            sends.append(prepared.group.send([byte], leaver, _SEEN_TAG))
        except RuntimeError as error:
            _log.info("worker %d ended before it was told: %s", leaver, one_line(error))
    return sends


def wait_for_all(prepared: PreparedGeneration) -> None:
    """On a worker that leaves: wait until all others have confirmed that they have seen the vote."""
    group = prepared.group
    others = [other for other in range(prepared.crew.num_workers) if other != prepared.crew.worker]
    for other in others:
        try:
            group.recv([torch.zeros(1, dtype=torch.uint8, device="cpu")], other, _SEEN_TAG).wait()
        except RuntimeError as error:
            # It has seen the vote or is dead; in both cases it needs nothing more from this worker.
            _log.info("worker %d ended before it confirmed the vote: %s", other, one_line(error))
