"""The interface of a migration in any mode: one worker's part of a plan, prepared beside training and run while
training stands still."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from etc_agent.migration.report import MigrationReport
from etc_agent.state.layout import Shard

Progress = Callable[[int, int], None]
"""Called with the bytes that this worker has sent and received so far, and with their final number."""


class Migration(Protocol):
    """Every worker of the plan calls `prepare` and then `run`; each of them may be called from any thread."""

    @property
    def targets(self) -> Mapping[Shard, torch.Tensor]:
        """The new local tensors, complete after `run`."""

    @property
    def staging_bytes(self) -> int:
        """Memory that the migration holds beside the old and the new state."""

    def prepare(self) -> None:
        """Agree on the plan with every other worker, make the connections and allocate what is needed.

        Raises:
            MigrationError: a worker has another plan, cannot take part, or does not answer in time.
        """

    def refresh(self, sources: Mapping[Shard, torch.Tensor]) -> frozenset[Shard]:
        """Take the old tensors as they are now, between `prepare` and `run`. Costs next to nothing where every one has
        its memory still.

        Returns:
            The shards whose tensors have other memory than before.

        Raises:
            MigrationError: a tensor is not what the plan says of it.
        """

    def run(self, progress: Progress | None = None) -> MigrationReport:
        """Move everything. Returns when this worker has sent and received all that the plan says.

        Raises:
            MigrationError: a peer was lost or too slow.
        """

    def close(self) -> None:
        """Close the connections, so that workers which wait for this one fail at once. The tensors stay."""
