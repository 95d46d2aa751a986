"""What happens before any data moves: all workers agree on the plan, and all pairs that exchange data connect."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence

import torch

from etc_agent.migration.errors import MigrationError
from etc_agent.migration.memory.memory_file import DESCRIPTION_BYTES
from etc_agent.migration.schedule import Message, Schedule
from etc_agent.migration.transport.wire import Wire, Work, first_line
from etc_agent.planner.transfers.plan import MigrationPlan


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
        """Exchange the first message with every peer, so that connections and kernel buffers exist before the switch:
        the digest of all messages from one to the other, as each end derives them.

        Raises:
            MigrationError: a peer sends other messages than this worker expects, or does not answer in time.
        """
        device = self._wire.device
        expected = _pair_digests([m for each in schedule.rounds for m in each.receives])
        sent = {peer: each.to(device) for peer, each in
                _pair_digests([m for each in schedule.rounds for m in each.sends]).items()}
        heard = {peer: torch.empty_like(each, device=device) for peer, each in expected.items()}
        self.exchange(sent, heard, 0, "the first message")
        wrong = [str(peer) for peer, each in expected.items() if heard[peer].tolist() != each.tolist()]
        if wrong:
            raise MigrationError(
                f"worker {self._worker}: worker {', '.join(wrong)} would send other messages than this worker expects; "
                "every worker must derive its instructions from the same manifests"
            )

    def exchange(
        self, told: Mapping[int, torch.Tensor], heard: Mapping[int, torch.Tensor], tag: int, what: str
    ) -> None:
        """Send a tensor to each peer in `told` and receive one from each in `heard`, and wait.

        Raises:
            MigrationError: a peer does not answer in time.
        """
        received, sent = self._wire.post(
            [(peer, tag, tensor.view(torch.uint8)) for peer, tensor in heard.items()],
            [(peer, tag, tensor.view(torch.uint8)) for peer, tensor in told.items()],
        )
        for peer, work in zip((*heard, *told), (*received, *sent), strict=True):
            self.wait(work, f"{what} from or to worker {peer}")

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


def _pair_digests(messages: Sequence[Message]) -> dict[int, torch.Tensor]:
    """Peer -> the SHA-256 of its messages: 32 bytes."""
    digests: dict[int, hashlib._Hash] = {}
    for message in messages:
        boxes = [(t.tensor.name, t.tensor.dtype, t.box.offset, t.box.shape, t.forwarded) for t in message.transfers]
        text = repr((message.tag, message.shared, boxes)).encode()
        digests.setdefault(message.peer, hashlib.sha256()).update(text)
    return {
        peer: torch.frombuffer(bytearray(digests[peer].digest()), dtype=torch.uint8) for peer in sorted(digests)
    }
