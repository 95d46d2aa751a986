"""From the manifests of two generations to the complete migration plan.

Every worker runs this on the same manifests and gets exactly the same plan: nothing here depends on hash order, time or
the worker that runs it. Three steps:

1. *Coverage* (`etc_agent.planner.coverage`): parts of a new shard that the worker holds itself are referred to; every
other
   part is a need, with the live workers that hold all of it.
2. *Sources*: each need gets one source, so that the busiest sender has as little as the replicas allow. A need with one
holder
   has no choice; the others are cut into chunks, which are assigned, the largest first, to the least busy holder.
3. *Rounds* (`etc_agent.planner.rounds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from etc_agent.planner.coverage import Coverage, Need, find_coverage
from etc_agent.planner.errors import PlanError
from etc_agent.planner.forwarding import CHUNK_BYTES, forward
from etc_agent.planner.loads import Links
from etc_agent.planner.memory import fit_rounds
from etc_agent.planner.plan import MigrationPlan, Refer, Transfer
from etc_agent.planner.rounds import make_rounds
from etc_agent.state.algebra import split_box
from etc_agent.state.boxes import Box
from etc_agent.state.layout import LogicalTensor, Manifest


def make_plan(
    previous: Sequence[Manifest],
    current: Sequence[Manifest],
    *,
    round_bytes: int = 64 << 20,
    round_transfers: int = 1024,
    nodes: Sequence[int] | None = None,
    links: Links | None = None,
    budget_bytes: int | None = None,
    forwarding: bool = False,
) -> MigrationPlan:
    """The plan that turns `previous` into `current`, where entry i of both is worker i's manifest.

    A worker that joins, or whose state is lost, has an empty previous manifest; one that leaves an empty current one.
    `round_bytes`: most bytes that one worker sends, and most that it receives, in one round. `round_transfers`: most
    transfers that one worker takes part in per round. `links`: where workers are on the network; then a source on the
    receiver's own node is preferred, and the time of ports is balanced before the bytes of workers. `nodes`: the same
    in short, worker -> number of its node, for nodes that are alike. `budget_bytes`: most bytes of
    state that a worker may hold at any time, in ``release`` mode (`etc_agent.planner.memory`). `forwarding`: receivers
    of the same box pass it on to each other (`etc_agent.planner.forwarding`), for executors that can do that.

    Raises:
        MissingSourceError: a needed box is held by nobody.
        PlanError: the budget cannot be met.
        PlanError: manifests disagree about a tensor, a shard is outside its tensor, or one worker's shards overlap.
    """
    if len(previous) != len(current):
        raise PlanError(f"{len(previous)} previous manifests but {len(current)} current ones; give both per worker")
    if round_bytes < 1 or round_transfers < 1:
        raise PlanError(f"a round needs room for a byte and a transfer, not {round_bytes} and {round_transfers}")
    if links is None:
        links = Links.apart(len(current)) if nodes is None else Links.by_node(nodes)
    if len(links.node_of) != len(current):
        raise PlanError(f"{len(links.node_of)} entries in `nodes` or `links`, but {len(current)} workers")
    coverage = find_coverage(previous, current)
    choose = forward if forwarding else _choose_sources
    transfers = choose(coverage, round_bytes, links)
    refers = tuple([Refer(k.worker, t, k.box, k.source_box, k.target_box) for t, k in coverage.kept()])
    if budget_bytes is None:
        rounds = make_rounds(transfers, len(current), round_bytes=round_bytes, round_transfers=round_transfers)
    else:
        rounds = fit_rounds(
            transfers, refers, previous, current,
            budget_bytes=budget_bytes, round_bytes=round_bytes, round_transfers=round_transfers,
        )
    return MigrationPlan(len(current), refers, rounds, _digest(len(current), coverage, rounds))


def _choose_sources(coverage: Coverage, round_bytes: int, links: Links) -> list[Transfer]:
    """One source for each need, or for each chunk of one; in the order of the tensors."""
    node_of, port_of, speed = links.node_of, links.port_of, links.bytes_per_s
    sent = [0] * len(node_of)
    busy_s = [0.0] * len(speed)
    transfers: list[Transfer | None] = []
    open_chunks: list[tuple[int, int, LogicalTensor, Need, Box]] = []
    for tensor, need in coverage.needs():
        itemsize, holders = tensor.itemsize, need.holders
        size = need.box.num_elements * itemsize
        share = round_bytes
        if len(holders) > 1:
            share = min(round_bytes, max(CHUNK_BYTES, -(-size // len(holders))))
        chunks = [need.box] if size <= share else split_box(need.box, max(1, share // itemsize))
        if len(holders) > 1:
            for box in chunks:
                open_chunks.append((-box.num_elements * itemsize, len(transfers), tensor, need, box))
                transfers.append(None)
            continue
        (source,) = holders
        sent[source] += size
        if node_of[source] != node_of[need.target]:
            busy_s[port_of[source]] += size / speed[port_of[source]]
        transfers += [
            Transfer(source, need.target, tensor, box, need.source_boxes[0], need.target_box) for box in chunks
        ]
    open_chunks.sort(key=lambda chunk: chunk[:2])
    for negative, index, tensor, need, box in open_chunks:
        home = node_of[need.target]
        nearby = [worker for worker in need.holders if node_of[worker] == home]
        if nearby:
            source = min(nearby, key=sent.__getitem__)
        else:
            source = min(
                need.holders,
                key=lambda worker: (busy_s[port_of[worker]] - negative / speed[port_of[worker]], sent[worker]),
            )
            busy_s[port_of[source]] -= negative / speed[port_of[source]]
        sent[source] -= negative
        transfers[index] = Transfer(source, need.target, tensor, box, need.source_box(source), need.target_box)
    return [transfer for transfer in transfers if transfer is not None]


def _digest(num_workers: int, coverage: Coverage, rounds: Sequence[Sequence[Transfer]]) -> str:
    """SHA-256 over a canonical text of the whole plan: the patterns, the tensors that follow them, the transfers."""
    digest = sha256(f"plan 1 {num_workers}\n".encode())
    for pattern in coverage.patterns:
        digest.update(pattern.canonical().encode())
    digest.update(repr([(t.name, t.shape, t.dtype, t.itemsize, index) for t, index in coverage.tensors]).encode())
    for transfers in rounds:
        lines = [(t.source, t.target, t.tensor.name, t.box.offset, t.box.shape, t.forwarded) for t in transfers]
        digest.update(repr(lines).encode())
    return digest.hexdigest()
