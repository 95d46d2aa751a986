"""How the state moves at a switch: what `keep` and `release` do differently there.

A mode is made while a generation is prepared, and has four parts in the switch:

    begin -> run -> take over -> (vote) -> committed, or refused

`begin` is where a mode says what has to be true before the first byte moves. A mode that sends beside one more step of
the old generation (hidden transfer, docs/architecture.md) would send there, and `run` what that step has changed.
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
        """Take the old tensors as the last step left them.

        Returns:
            Those that have other memory than when the change was prepared.

        Raises:
            EtcError: one of them cannot be moved as it is now.
        """

    def begin(self, attempt: Attempt) -> bool:
        """Whether the migration starts: the same on every worker that can still be reached."""

    def take_over(self) -> None:
        """Give the tensors that have come to the new generation's model and optimizer. Before the vote."""

    def close(self) -> None:
        """Take no further part. What is needed for `account` stays."""

    def account(self) -> str:
        """What this worker has released of the old state, as the end of a message to people; "" for nothing."""

    def refused(self, generation: int, attempt: Attempt) -> None:
        """The vote has failed after `begin`. Returns where the old generation can go on.

        Raises:
            StateLostError, SwitchError: it cannot; the second where workers were lost.
        """
