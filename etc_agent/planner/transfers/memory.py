"""How much memory a plan uses on each worker, and rounds that stay within a budget.

Two modes. ``keep``: old and new state exist together until the commit, so that an aborted migration loses nothing.
``release``: a new shard is allocated in the round that first receives a part of it (and local parts are copied into it
then); an old shard is freed after the round with its last use. A new shard made of local parts only is copied as soon
as the old shards are not sent from any more, so that these can be freed. Shards that are referred to as a whole keep
their storage. Buffers of the transport come on top: at most what one round sends and receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Literal

from etc_agent.planner.errors import PlanError
from etc_agent.planner.transfers.plan import MigrationPlan, Refer, Transfer
from etc_agent.state.boxes import Box
from etc_agent.state.layout import Manifest

Mode = Literal["keep", "release"]
_Key = tuple[int, str, Box]
"""Worker, tensor name, shard."""


class _Ledger:
    """The memory of all workers from round to round, in ``release`` mode."""

    def __init__(self, previous: Sequence[Manifest], current: Sequence[Manifest], refers: Sequence[Refer]) -> None:
        self.size: dict[_Key, int] = {}
        kept = {(r.worker, r.tensor.name, r.box) for r in refers if r.is_whole}
        self.live = [0] * len(previous)
        self.uses: dict[_Key, int] = {}
        for worker, manifest in enumerate(previous):
            for shard in manifest:
                key = (worker, shard.tensor.name, shard.box)
                self.live[worker] += shard.num_bytes
                if key not in kept:
                    self.uses[key] = 0
                    self.size[key] = shard.num_bytes
        self.unborn: dict[_Key, int] = {
            (worker, shard.tensor.name, shard.box): shard.num_bytes
            for worker, manifest in enumerate(current)
            for shard in manifest
            if (worker, shard.tensor.name, shard.box) not in kept
        }
        self.copies: dict[_Key, list[_Key]] = {}
        for refer in refers:
            if not refer.is_whole:
                source = (refer.worker, refer.tensor.name, refer.source_box)
                self.copies.setdefault((refer.worker, refer.tensor.name, refer.target_box), []).append(source)
                self.uses[source] += 1
        self.sends: dict[_Key, int] = dict.fromkeys(self.uses, 0)
        self.local: dict[_Key, list[_Key]] = {}
        """Old shard -> the new shards that are made of local parts alone, this among them."""
        self.peak = list(self.live)
        self._used: list[_Key] = []

    def expect(self, transfers: Sequence[Transfer]) -> None:
        """Count the sends to come, and free shards that nobody will use."""
        for transfer in transfers:
            key = source_of(transfer)
            if key in self.uses and not transfer.forwarded:
                self.uses[key] += 1
                self.sends[key] += 1
        received = {target_of(transfer) for transfer in transfers}
        for target, sources in self.copies.items():
            if target not in received:
                for source in dict.fromkeys(sources):
                    self.local.setdefault(source, []).append(target)
        for key in [key for key, uses in self.uses.items() if not uses]:
            self._free(key)

    def need(self, transfer: Transfer) -> int:
        """The bytes that the receiver of `transfer` has to allocate for it."""
        return self.unborn.get(target_of(transfer), 0)

    def source_need(self, transfer: Transfer) -> int:
        """The bytes that its source has to allocate in the same round: local copies for which this is the last send."""
        return sum(self.unborn[key] for key in self._released_by(transfer))

    def add(self, transfer: Transfer) -> None:
        """Add `transfer` to the present round."""
        self.allocate(target_of(transfer))
        if not transfer.forwarded:
            for target in self._released_by(transfer):
                self.allocate(target)
            source = source_of(transfer)
            self._used.append(source)
            if source in self.sends:
                self.sends[source] -= 1

    def _released_by(self, transfer: Transfer) -> list[_Key]:
        source = source_of(transfer)
        if transfer.forwarded or self.sends.get(source) != 1:
            return []
        return [
            target for target in self.local.get(source, ())
            if target in self.unborn and not any(self.sends[other] for other in self.copies[target] if other != source)
        ]

    def allocate(self, key: _Key) -> None:
        size = self.unborn.pop(key, None)
        if size is not None:
            self.live[key[0]] += size
            self.peak[key[0]] = max(self.peak[key[0]], self.live[key[0]])
            self._used += self.copies.get(key, [])

    def copy_local(self, budget_bytes: float = inf) -> None:
        """Copy the new shards of local parts only that wait for no send, one after the other, as far as they fit."""
        for target in dict.fromkeys(target for targets in self.local.values() for target in targets):
            size = self.unborn.get(target)
            if size is None or any(self.sends[source] for source in self.copies[target]):
                continue
            if self.live[target[0]] + size <= budget_bytes:
                self.allocate(target)
                self.end_round()

    def end_round(self) -> None:
        """Free old shards after their last use."""
        for key in self._used:
            if key in self.uses:
                self.uses[key] -= 1
                if not self.uses[key]:
                    self._free(key)
        self._used.clear()

    def finish(self) -> None:
        """Add what is left: new shards that are empty."""
        for key in list(self.unborn):
            self.allocate(key)
            self.end_round()

    def _free(self, key: _Key) -> None:
        self.live[key[0]] -= self.size[key]
        del self.uses[key]


def source_of(transfer: Transfer) -> _Key:
    """The old shard that the transfer sends from."""
    return transfer.source, transfer.tensor.name, transfer.source_box


def target_of(transfer: Transfer) -> _Key:
    """The new shard that the transfer is received into."""
    return transfer.target, transfer.tensor.name, transfer.target_box


def peak_bytes(
    plan: MigrationPlan, previous: Sequence[Manifest], current: Sequence[Manifest], mode: Mode
) -> tuple[int, ...]:
    """Most bytes of state that each worker holds at one time while `plan` runs."""
    if mode == "keep":
        whole = [0] * plan.num_workers
        for refer in plan.refers:
            if refer.is_whole:
                whole[refer.worker] += refer.box.num_elements * refer.tensor.itemsize
        return tuple(
            sum(shard.num_bytes for manifest in pair for shard in manifest) - shared
            for *pair, shared in zip(previous, current, whole, strict=True)
        )
    ledger = _Ledger(previous, current, plan.refers)
    ledger.expect([transfer for transfers in plan.rounds for transfer in transfers])
    ledger.copy_local()
    for transfers in plan.rounds:
        for transfer in transfers:
            ledger.add(transfer)
        ledger.end_round()
    ledger.finish()
    return tuple(ledger.peak)


def fit_rounds(
    transfers: Sequence[Transfer],
    refers: Sequence[Refer],
    previous: Sequence[Manifest],
    current: Sequence[Manifest],
    *,
    budget_bytes: int,
    round_bytes: int,
    round_transfers: int,
) -> tuple[tuple[Transfer, ...], ...]:
    """Rounds in ``release`` mode in which no worker ever holds more than `budget_bytes` of state.

    Greedy: first transfers into shards that are already allocated, then those that need least; the source with the
    fewest uses left first.

    Raises:
        PlanError: no order was found; names the worker that is closest to its budget.
    """
    ledger = _Ledger(previous, current, refers)
    over = max(range(len(previous)), key=lambda worker: ledger.live[worker], default=None)
    if over is not None and ledger.live[over] > budget_bytes:
        raise PlanError(f"worker {over} holds {ledger.live[over]} bytes of state already, the budget is {budget_bytes}")
    ledger.expect(transfers)
    ledger.copy_local(budget_bytes)
    pending = list(enumerate(transfers))
    rounds: list[tuple[Transfer, ...]] = []
    arrived: set[_Key] = set()
    while pending:
        pending.sort(key=lambda item: (ledger.need(item[1]), ledger.uses.get(source_of(item[1]), 0), item[0]))
        sent, received, count = ([0] * len(previous) for _ in range(3))
        chosen: list[Transfer] = []
        left: list[tuple[int, Transfer]] = []
        for number, transfer in pending:
            source, target, size = transfer.source, transfer.target, transfer.num_bytes
            fits = (
                max(count[source], count[target]) < round_transfers
                and (not sent[source] or sent[source] + size <= round_bytes)
                and (not received[target] or received[target] + size <= round_bytes)
                and ledger.live[target] + ledger.need(transfer) <= budget_bytes
                and ledger.live[source] + ledger.source_need(transfer) <= budget_bytes
                and (not transfer.forwarded or (source, transfer.tensor.name, transfer.box) in arrived)
            )
            if not fits:
                left.append((number, transfer))
                continue
            ledger.add(transfer)
            chosen.append(transfer)
            sent[source] += size
            received[target] += size
            count[source] += 1
            count[target] += 1
        if not chosen:
            worker, need = min(
                ((t.target, ledger.live[t.target] + ledger.need(t)) for _, t in left), key=lambda item: item[1]
            )
            raise PlanError(
                f"the state does not fit the memory budget of {budget_bytes} bytes per worker: worker {worker} would "
                f"hold {need}; raise the budget, or choose a config that leaves more room"
            )
        ledger.end_round()
        ledger.copy_local(budget_bytes)
        rounds.append(tuple(chosen))
        arrived.update((transfer.target, transfer.tensor.name, transfer.box) for transfer in chosen)
        pending = left
    for key in list(ledger.unborn):
        if ledger.live[key[0]] + ledger.unborn[key] > budget_bytes:
            raise PlanError(f"{key[1]}: the new shard on worker {key[0]} exceeds the budget of {budget_bytes} bytes")
        ledger.allocate(key)
        ledger.end_round()
    return tuple(rounds)
