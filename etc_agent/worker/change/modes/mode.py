"""How the state moves at a switch: what `keep` and `release` do differently there.

A mode is created while a generation is prepared. It has four parts in the switch:

    begin -> run -> take over -> (vote) -> committed, or refused

`begin` is where a mode checks what must be true before the first byte moves. A mode that sends during one more step of
the old generation (hidden transfer, docs/architecture.md) would send there, and `run` would send what that step
changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from etc_agent.migration.protocol import Migration
from etc_agent.state.layout import Shard

if TYPE_CHECKING:
    from etc_agent.worker.change.attempt import Attempt


class Mode(Protocol):
    """One worker's side of a mode, prepared for one change.

    `migration`: moves the tensors; its `run` is the mode's second part.
    """

    @property
    def migration(self) -> Migration: ...

    def refresh(self, sources: Mapping[Shard, torch.Tensor]) -> frozenset[Shard]:
        """Read the old tensors as the last step left them.

        Returns:
            The shards whose memory is not the same as when the change was prepared.

        Raises:
            EtcError: one of them cannot be moved in its present form.
        """

    def begin(self, attempt: Attempt) -> bool:
        """Whether the migration starts; the same on every worker that can still be reached."""

    def take_over(self) -> None:
        """Give the new generation's model and optimizer the tensors that have arrived. Called before the vote."""

    def close(self) -> None:
        """Release connections and memory. `account` still works afterwards."""

    def account(self) -> str:
        """What this worker has released of the old state, as the end of a message to people; "" for nothing."""

    def refused(self, generation: int, attempt: Attempt) -> None:
        """Called when the vote fails after `begin`. Returns normally if the old generation can continue.

        Raises:
            StateLostError, SwitchError: it cannot continue; SwitchError if workers were lost.
        """
