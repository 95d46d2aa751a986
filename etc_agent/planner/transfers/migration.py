"""From the manifests of two generations to the complete migration plan.

The same manifests give exactly the same plan: nothing here depends on hash order, time or the worker that runs it. A
session does not make complete plans: each worker derives its own part (`transfers.instructions`), by the same
rules and with the same result. Three steps:

1. *Coverage* (`transfers.coverage`): parts of a new shard that the worker holds itself are referred to; every
other part is a need, with the live workers that hold all of it.
2. *Sources* (`transfers.routes`): needs are cut into chunks, and each gets a source, so that all who hold it
send about as much.
3. *Rounds* (`transfers.rounds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from etc_agent.planner.errors import PlanError
from etc_agent.planner.transfers.coverage import Coverage, find_coverage
from etc_agent.planner.transfers.demands import demands_of
from etc_agent.planner.transfers.instructions import num_regions
from etc_agent.planner.transfers.memory import fit_rounds
from etc_agent.planner.transfers.plan import MigrationPlan, Refer, Transfer
from etc_agent.planner.transfers.rounds import Kind, Limits, Region, in_order, transfers_of
from etc_agent.state.layout import Manifest

ROUND_BYTES = 64 << 20
ROUND_TRANSFERS = 1024


def make_plan(
    previous: Sequence[Manifest],
    current: Sequence[Manifest],
    *,
    round_bytes: int = ROUND_BYTES,
    round_transfers: int = ROUND_TRANSFERS,
    nodes: Sequence[int] | None = None,
    budget_bytes: int | None = None,
    forwarding: bool = False,
) -> MigrationPlan:
    """The plan that turns `previous` into `current`, where entry i of both is worker i's manifest.

    A worker that joins, or whose state is lost, has an empty previous manifest; one that leaves an empty current one.
    `round_bytes`: most bytes that one worker sends, and most that it receives, in one round. `round_transfers`: most
    transfers that one worker takes part in per round, as far as its regions (`transfers.rounds`) and the workers that
    one holder serves are not more than that. A round of single elements may exceed both. `nodes`: worker ->
    number of its node; a source on the receiver's own node is preferred, and nodes send equal parts. By default every
    worker is on a node of its own. `budget_bytes`: most bytes of state that a worker may hold at any time, in
    ``release`` mode (`transfers.memory`). `forwarding`: receivers of the same box pass it on to each other, for
    executors that can do that.

    Raises:
        MissingSourceError: a needed box is held by nobody.
        PlanError: the budget cannot be met.
        PlanError: manifests disagree about a tensor, a shard is outside its tensor, or one worker's shards overlap.
    """
    if len(previous) != len(current):
        raise PlanError(f"{len(previous)} previous manifests but {len(current)} current ones; give both per worker")
    if round_bytes < 1 or round_transfers < 1:
        raise PlanError(f"a round needs room for a byte and a transfer, not {round_bytes} and {round_transfers}")
    nodes = range(len(current)) if nodes is None else nodes
    if len(nodes) != len(current):
        raise PlanError(f"{len(nodes)} entries in `nodes`, but {len(current)} workers")
    coverage = find_coverage(previous, current)
    regions = _regions(coverage, nodes, forwarding=forwarding)
    most = max((num_regions(regions, worker, forwarding=forwarding) for worker in range(len(current))), default=0)
    limits = Limits(round_bytes, round_transfers, max(1, most))
    transfers = [
        transfer for region in regions for tensor, number, cut in region.rounds(limits)
        for transfer in transfers_of(tensor, number, cut)
    ]
    refers = tuple([Refer(k.worker, t, k.box, k.source_box, k.target_box) for t, k in coverage.kept()])
    rounds = in_order(transfers)
    if budget_bytes is not None:
        rounds = fit_rounds(
            [transfer for each in rounds for transfer in each], refers, previous, current,
            budget_bytes=budget_bytes, round_bytes=round_bytes, round_transfers=round_transfers,
        )
    return MigrationPlan(len(current), refers, rounds, _digest(len(current), coverage, rounds))


def _regions(coverage: Coverage, nodes: Sequence[int], *, forwarding: bool) -> list[Region]:
    node_of = np.asarray(nodes, dtype=np.int64)
    regions: dict[tuple[tuple[int, ...], tuple[int, ...]], Region] = {}
    kinds: dict[tuple[int, int], Kind] = {}
    for tensor, index in coverage.tensors:
        pattern = coverage.patterns[index]
        key = (index, tensor.itemsize)
        if key not in kinds:
            kinds[key] = Kind(demands_of(pattern), tensor.itemsize, node_of, forwarding=forwarding)
        regions.setdefault((pattern.previous, pattern.current), Region()).add(tensor, kinds[key])
    return list(regions.values())


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
