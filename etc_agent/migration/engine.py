"""Runs one worker's part of a migration plan on real tensors.

Every worker derives the same messages from the plan (`schedule`). In a run, the receives and sends of a round are
posted together, and the next round is posted before the last one is waited for; so no pair of workers ever waits for
another pair, and the wire does not idle between rounds:

    post 0 . copy what stays . post 1 . finish 0 . post 2 . finish 1 . ... . finish n-1

A contiguous box travels from tensor to tensor in place. Small boxes, and boxes that are not contiguous in their shard,
pass through a staging buffer; each of the two rounds in flight has its own. Workers of one host whose new tensors lie
in shared memory write into them directly (`shared`).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from etc_agent.migration.binding import Binder, BoundMessage, BoundRound, LocalCopies, same_memory
from etc_agent.migration.bits import copy_bits
from etc_agent.migration.check import check_tensors, describe, needed_shards
from etc_agent.migration.errors import MigrationError
from etc_agent.migration.report import MigrationReport, SpanRecorder
from etc_agent.migration.schedule import Message, schedule_for
from etc_agent.migration.shared import DESCRIPTION_BYTES, PeerMemory, SharedMemory, map_peer
from etc_agent.migration.staging import Staging
from etc_agent.migration.wire import Operation, Wire, Work, first_line
from etc_agent.planner.plan import MigrationPlan
from etc_agent.state.layout import Shard

WINDOW = 2
"""Rounds in flight together."""


class Migration:
    """One worker's part of a plan: prepared beside training, run while training stands still.

    Every worker of the plan must call `prepare` and then `run`; each of them may be called from any thread.

    Args:
        plan: the same plan on every worker.
        worker: this worker's number in the plan.
        sources: the old local tensors by shard; empty for a worker that joins. Read only.
        targets: the new local tensors by shard; empty for a worker that leaves. The target of a whole `Refer` either
            shares its source's memory (nothing is copied) or has its own (it is copied).
        group: a raw c10d backend over the plan's workers, rank = worker number. No other thread may use it for
            point-to-point meanwhile.
        timeout_s: longest time in which no message completes before the migration is given up.
        memory: where `targets` were allocated, if peers on this host may write into them (`shared`).

    Raises:
        MigrationError: a tensor is not what the plan says of it; the message names worker, tensor and box.
    """

    def __init__(
        self,
        plan: MigrationPlan,
        worker: int,
        sources: Mapping[Shard, torch.Tensor],
        targets: Mapping[Shard, torch.Tensor],
        group: Any,
        *,
        timeout_s: float,
        memory: SharedMemory | None = None,
    ) -> None:
        self._plan = plan
        self._worker = worker
        self._wire = Wire(group)
        if self._wire.size != plan.num_workers:
            raise MigrationError(
                f"worker {worker}: the plan is for {plan.num_workers} workers, the process group has {self._wire.size}"
            )
        self._old_shards, new_shards = needed_shards(plan, worker)
        check_tensors(worker, "old", self._old_shards, sources)
        check_tensors(worker, "new", new_shards, targets)
        self._sources = dict(sources)
        self._targets = dict(targets)
        self._schedule = schedule_for(plan, worker)
        self._memory = memory
        self._peer_memory: dict[int, PeerMemory] = {}
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._device = _device_of((*sources.values(), *targets.values()))
        self._staging: Staging | None = None
        self._rounds: list[BoundRound] = []
        self._local = LocalCopies((), (), 0)

    @property
    def staging_bytes(self) -> int:
        """Memory that the migration holds beside the old and the new state."""
        return self._staging.num_bytes if self._staging else 0

    def prepare(self) -> None:
        """Agree on the plan with every other worker, warm the connections, map shared memory, allocate and touch the
        staging buffers.

        Raises:
            MigrationError: a worker has another plan, or does not take part in time.
        """
        described = self._agree()
        writers = self._meet_peers(described)
        if self._memory is not None:
            self._memory.close()
        shared = {(self._worker, peer) for peer in self._peer_memory} | {(peer, self._worker) for peer in writers}
        self._schedule = schedule_for(self._plan, self._worker, shared)
        self._bind()

    def refresh(self, sources: Mapping[Shard, torch.Tensor]) -> None:
        """Take over replaced source tensors. Costs next to nothing where every tensor still has its memory.

        Raises:
            MigrationError: as for the constructor.
        """
        known = self._sources
        if all(shard in known and same_memory(known[shard], tensor) for shard, tensor in sources.items()):
            return
        check_tensors(self._worker, "old", self._old_shards, sources)
        self._sources = dict(sources)
        if self._staging is not None:
            self._bind()

    def run(self) -> MigrationReport:
        """Move everything. Returns when this worker has sent and received all that the plan says.

        Raises:
            MigrationError: a peer was lost or too slow. Targets are then undefined, sources untouched.
        """
        if self._staging is None:
            raise MigrationError(f"worker {self._worker}: run() needs prepare() on every worker first")
        recorder = SpanRecorder()
        start = time.perf_counter()
        with self._stream():
            in_flight = self._post(0, recorder)
            with recorder.span("local copies"):
                copy_bits(self._local.copy_to, self._local.copy_from)
            for number in range(len(self._rounds)):
                following = self._post(number + 1, recorder)
                with recorder.span(f"finish round {number}"):
                    self._finish(number, in_flight)
                in_flight = following
        return MigrationReport(
            seconds=time.perf_counter() - start,
            sent_bytes=sum(bound.payload_bytes for r in self._rounds for bound in r.sends),
            received_bytes=sum(bound.payload_bytes for r in self._rounds for bound in r.receives),
            referred_bytes=self._local.referred_bytes,
            rounds=len(self._rounds),
            spans=tuple(recorder.spans),
        )

    # -- prepare

    def _agree(self) -> list[bytes]:
        """Exchange plan digests and descriptions of shared memory; returns the descriptions by worker.

        Nobody may wait for messages that a peer with another plan never sends.
        """
        digest = hashlib.sha256(self._plan.digest.encode()).digest()
        mine = digest + self._described_memory()
        row = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self._wire_device)
        rows = [bytes(theirs.tolist()) for theirs in self._wire.all_gather(row, self._timeout)]
        others = [str(worker) for worker, theirs in enumerate(rows) if theirs[: len(digest)] != digest]
        if others:
            raise MigrationError(
                f"worker {self._worker}: the plan of worker {', '.join(others)} differs from mine "
                f"({self._plan.digest[:16]}); every worker must plan from the same manifests"
            )
        return [theirs[len(digest) :] for theirs in rows]

    def _described_memory(self) -> bytes:
        messages = (message for scheduled in self._schedule.rounds for message in scheduled.receives)
        received = {Shard(t.tensor, t.target_box) for message in messages for t in message.transfers}
        if self._memory is None or not all(self._memory.holds(shard, self._targets[shard]) for shard in received):
            return bytes(DESCRIPTION_BYTES)
        return self._memory.describe()

    def _meet_peers(self, described: Sequence[bytes]) -> list[int]:
        """Send every peer its first message, which pays for connections and kernel buffers. It says whether the sender
        has mapped the receiver's memory; returns the peers that have mapped mine."""
        receive_peers, send_peers = self._schedule.receive_peers, self._schedule.send_peers
        for peer in send_peers:
            memory = map_peer(self._plan, peer, described[peer])
            if memory is not None:
                self._peer_memory[peer] = memory
        answers = torch.tensor([peer in self._peer_memory for peer in send_peers], dtype=torch.uint8)
        answers = answers.to(self._wire_device)
        arriving = torch.zeros(len(receive_peers), dtype=torch.uint8, device=self._wire_device)
        received, sent = self._wire.post(
            [(peer, 0, arriving[i : i + 1]) for i, peer in enumerate(receive_peers)],
            [(peer, 0, answers[i : i + 1]) for i, peer in enumerate(send_peers)],
        )
        for peer, work in zip((*receive_peers, *send_peers), (*received, *sent), strict=True):
            self._wait(work, f"the first message from or to worker {peer}")
        return [peer for peer, mapped in zip(receive_peers, arriving.tolist(), strict=True) if mapped]

    def _bind(self) -> None:
        binder = Binder(self._sources.__getitem__, self._targets.__getitem__, self._wire.moves, self._peer_memory)
        needs = [binder.staging_need_bytes(scheduled) for scheduled in self._schedule.rounds]
        if self._staging is None or not self._staging.fits(needs):
            pinned = self._device.type == "cuda" and not self._wire.is_nccl
            self._staging = Staging(needs, WINDOW, self._wire_device, pinned=pinned)
        self._rounds = [binder.bind(r, self._staging.slot(number)) for number, r in enumerate(self._schedule.rounds)]
        self._local = binder.bind_local(self._schedule.refers)

    @property
    def _wire_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self._wire.is_nccl else torch.device("cpu")

    # -- run

    def _post(self, number: int, recorder: SpanRecorder) -> tuple[list[Work], list[Work]]:
        if number >= len(self._rounds):
            return [], []
        with recorder.span(f"post round {number}"):
            bound = self._rounds[number]
            receives = [(b.message.peer, b.message.tag, b.buffer) for b in bound.receives]
            return self._wire.post(receives, map(self._packed, bound.sends))

    def _packed(self, bound: BoundMessage) -> Operation:
        if bound.copy_to:
            copy_bits(bound.copy_to, bound.copy_from)
            self._settle_copies()
        return bound.message.peer, bound.message.tag, bound.buffer

    def _finish(self, number: int, in_flight: tuple[list[Work], list[Work]]) -> None:
        received, sent = in_flight
        bound = self._rounds[number]
        for b, work in zip(bound.receives, received, strict=True):
            self._wait(work, f"round {number}: receiving {_contents(b.message)} from worker {b.message.peer}")
            copy_bits(b.copy_to, b.copy_from)
        for b, work in zip(bound.sends, sent, strict=True):
            self._wait(work, f"round {number}: sending {_contents(b.message)} to worker {b.message.peer}")
        self._settle_copies()

    def _wait(self, work: Work, doing: str) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise MigrationError(f"worker {self._worker}: {doing} failed: {first_line(error)}") from error

    def _stream(self) -> contextlib.AbstractContextManager[Any]:
        """A stream of its own on a GPU, ordered after all that training has queued."""
        if self._device.type != "cuda":
            return contextlib.nullcontext()
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(stream)

    def _settle_copies(self) -> None:
        """The host is about to read, or to reuse, what a device copies."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The GPU where any of the state is on one; optimizers keep some scalars on the host."""
    return next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))


def _contents(message: Message) -> str:
    first = describe(message.transfers[0].tensor, message.transfers[0].box)
    return first if len(message.transfers) == 1 else f"{first} and {len(message.transfers) - 1} more"
