"""What happens before any data moves: all workers agree on the plan, and all pairs that exchange data connect."""

from __future__ import annotations

import datetime
import hashlib

import torch

from etc_agent.migration.errors import MigrationError
from etc_agent.migration.memory.memory_file import DESCRIPTION_BYTES
from etc_agent.migration.schedule import Schedule
from etc_agent.migration.transport.wire import Wire, Work, first_line
from etc_agent.planner.plan import MigrationPlan


class Peers:
    """The other workers of a plan, as one worker sees them."""

    def __init__(self, plan: MigrationPlan, worker: int, wire: Wire, timeout_s: float) -> None:
        self._plan = plan
        self._worker = worker
        self._wire = wire
        self._timeout = datetime.timedelta(seconds=timeout_s)

    def agree(self, complaint: str | None, described: bytes | None) -> list[bytes]:
        """Exchange plan digests, complaints and descriptions of shared memory; returns the descriptions in worker
        order.

        Collective. It prevents that a worker waits for messages which a peer with a different plan never sends.

        Args:
            complaint: why this worker cannot take part, or None. It becomes this worker's error; the others name it.
            described: how peers can map this worker's shared memory, or None.

        Raises:
            MigrationError: a worker has another plan, cannot take part, or does not answer in time.
        """
        digest = hashlib.sha256(self._plan.digest.encode()).digest()
        mine = digest + bytes([complaint is not None]) + (described or b"").ljust(DESCRIPTION_BYTES, b"\0")
        row = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self._wire.device)
        try:
            rows = [bytes(theirs.tolist()) for theirs in self._wire.all_gather(row, self._timeout)]
        except RuntimeError as error:
            raise self._absent(error) from error
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

    def gather(self, mine: bytes) -> list[bytes]:
        """Exchange byte strings; returns one per worker, in worker order. Collective.

        Raises:
            MigrationError: a worker does not answer in time.
        """
        try:
            return self._wire.gather_bytes(mine, self._timeout)
        except RuntimeError as error:
            raise self._absent(error) from error

    def meet(self, schedule: Schedule) -> None:
        """Exchange the first message with every peer, so that connections and kernel buffers exist before the
        switch."""
        receive_peers, send_peers = schedule.receive_peers, schedule.send_peers
        byte = torch.zeros(1, dtype=torch.uint8, device=self._wire.device)
        received, sent = self._wire.post([(p, 0, byte) for p in receive_peers], [(p, 0, byte) for p in send_peers])
        for peer, work in zip((*receive_peers, *send_peers), (*received, *sent), strict=True):
            self.wait(work, f"the first message from or to worker {peer}")

    def wait(self, work: Work, doing: str) -> None:
        """Wait for an operation.

        Raises:
            MigrationError: it failed, or took longer than the timeout.
        """
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise MigrationError(f"worker {self._worker}: {doing} failed: {first_line(error)}") from error

    def _absent(self, error: RuntimeError) -> MigrationError:
        return MigrationError(
            f"worker {self._worker}: not every worker takes part in the migration: {first_line(error)}"
        )
