"""Before anything moves: every worker agrees on the plan, and every pair that will exchange bytes has met."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Collection

import torch

from etc_agent.migration.errors import MigrationError
from etc_agent.migration.memory_file import DESCRIPTION_BYTES
from etc_agent.migration.schedule import Schedule
from etc_agent.migration.wire import Wire, Work, first_line
from etc_agent.planner.plan import MigrationPlan


class Peers:
    """The other workers of a plan, as one worker sees them."""

    def __init__(self, plan: MigrationPlan, worker: int, wire: Wire, timeout_s: float) -> None:
        self._plan = plan
        self._worker = worker
        self._wire = wire
        self._timeout = datetime.timedelta(seconds=timeout_s)

    def agree(self, complaint: str | None, described: bytes | None) -> list[bytes]:
        """Exchange plan digests, complaints and descriptions of shared memory; returns the descriptions by worker.

        Collective. Nobody may wait for messages that a peer with another plan never sends.

        Args:
            complaint: why this worker cannot take part, for its own error; the others name it.
            described: this worker's shared memory.

        Raises:
            MigrationError: a worker has another plan, cannot take part, or does not answer in time.
        """
        digest = hashlib.sha256(self._plan.digest.encode()).digest()
        mine = digest + bytes([complaint is not None]) + (described or bytes(DESCRIPTION_BYTES))
        row = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self._wire.device)
        try:
            rows = [bytes(theirs.tolist()) for theirs in self._wire.all_gather(row, self._timeout)]
        except RuntimeError as error:
            raise MigrationError(
                f"worker {self._worker}: not every worker takes part in the migration: {first_line(error)}"
            ) from error
        size = len(digest)
        others = [str(worker) for worker, theirs in enumerate(rows) if theirs[:size] != digest]
        if others:
            raise MigrationError(
                f"worker {self._worker}: the plan of worker {', '.join(others)} differs from mine "
                f"({self._plan.digest[:16]}); every worker must plan from the same manifests"
            )
        if complaint is not None:
            raise MigrationError(complaint)
        refusing = [str(worker) for worker, theirs in enumerate(rows) if theirs[size]]
        if refusing:
            raise MigrationError(f"worker {self._worker}: worker {', '.join(refusing)} cannot take part; see its error")
        return [theirs[size + 1 :] for theirs in rows]

    def meet(self, schedule: Schedule, mapped: Collection[int]) -> list[int]:
        """Exchange the first message with every peer, which pays for connections and kernel buffers.

        Args:
            mapped: the peers whose memory this worker has mapped; they are told.

        Returns:
            The peers that have mapped this worker's.
        """
        receive_peers, send_peers = schedule.receive_peers, schedule.send_peers
        answers = torch.tensor([peer in mapped for peer in send_peers], dtype=torch.uint8).to(self._wire.device)
        arriving = torch.zeros(len(receive_peers), dtype=torch.uint8, device=self._wire.device)
        received, sent = self._wire.post(
            [(peer, 0, arriving[i : i + 1]) for i, peer in enumerate(receive_peers)],
            [(peer, 0, answers[i : i + 1]) for i, peer in enumerate(send_peers)],
        )
        for peer, work in zip((*receive_peers, *send_peers), (*received, *sent), strict=True):
            self.wait(work, f"the first message from or to worker {peer}")
        return [peer for peer, did in zip(receive_peers, arriving.tolist(), strict=True) if did]

    def wait(self, work: Work, doing: str) -> None:
        """Wait for an operation.

        Raises:
            MigrationError: it failed, or took longer than the timeout.
        """
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise MigrationError(f"worker {self._worker}: {doing} failed: {first_line(error)}") from error
