"""The plan summary: a change on a modelled cluster in numbers: what is kept, bytes per link, bottleneck, memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from etc_agent.parallel.topology import Placement, Slot, Topology, node_numbers
from etc_agent.planner.paper import paper_sketch
from etc_agent.planner.placing.model_atoms import model_atoms
from etc_agent.planner.placing.placement import Least, Sketch, place_atoms
from etc_agent.planner.transfers.effect import buffer_bytes, by_worker, num_transfers, traffic_of
from etc_agent.planner.transfers.memory import peak_bytes
from etc_agent.planner.transfers.migration import make_plan
from etc_agent.state.sharding import Sharding

Policy = Literal["etc", "paper"]
MAX_LISTED = 128
"""Up to this many workers the plan is written out transfer by transfer."""
FABRIC_BYTES_PER_S = 450e9
"""Bandwidth between slots of one node, unless given."""


@dataclass(frozen=True, slots=True, eq=False)
class PlanSummary:
    """`kept_bytes`: per current rank. The rest only where the job is small enough to be written out, else None.

    `traffic`: bytes from node to node, (nodes, nodes), in the order of the topology. `port_bytes`: name -> (sent,
    received) between nodes. `peak_bytes`: per worker in the memory mode asked for, on the slots `workers`. `digest`,
    `num_rounds`, `num_transfers`: of the plan. `buffer_bytes`: most that a worker sends and receives in one round, for
    which it may need buffers beside its state.
    """

    previous: Sharding
    current: Sharding
    topology: Topology
    previous_placement: Placement
    sketch: Sketch
    policy: Policy
    kept_bytes: tuple[int, ...]
    needed_bytes: tuple[int, ...]
    predicted_s: float
    traffic: NDArray[np.int64] | None = None
    port_bytes: dict[str, tuple[int, int]] | None = None
    peak_bytes: tuple[int, ...] | None = None
    buffer_bytes: int | None = None
    workers: tuple[Slot, ...] | None = None
    num_rounds: int | None = None
    num_transfers: int | None = None
    digest: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values; sizes in bytes, times in seconds."""
        return {
            "model": self.previous.model.name,
            "from": str(self.previous.config),
            "to": str(self.current.config),
            "policy": self.policy,
            "nodes": {node.name: node.num_slots for node in self.topology.nodes},
            "previous_placement": [str(slot) for slot in self.previous_placement],
            "placement": [str(slot) for slot in self.sketch.placement],
            "sketch": [list(pair) for pair in self.sketch.pairs],
            "nodes_occupied": self.sketch.num_nodes,
            "needed_bytes": list(self.needed_bytes),
            "kept_bytes": list(self.kept_bytes),
            "moved_bytes": self.sketch.moved_bytes,
            "between_nodes_bytes": self.sketch.between_nodes_bytes,
            "changed_ranks": self.sketch.changed_ranks,
            "bottleneck_s": self.sketch.bottleneck_s,
            "lower_bound_s": self.sketch.bound_s,
            "predicted_s": self.predicted_s,
            "ports": self.port_bytes,
            "traffic_bytes": None if self.traffic is None else self.traffic.tolist(),
            "workers": None if self.workers is None else [str(slot) for slot in self.workers],
            "peak_bytes": self.peak_bytes,
            "buffer_bytes": self.buffer_bytes,
            "rounds": self.num_rounds,
            "transfers": self.num_transfers,
            "digest": self.digest,
        }


def summarise(
    previous: Sharding,
    current: Sharding,
    topology: Topology,
    *,
    policy: Policy = "etc",
    least: Least = "time",
    pack: bool = False,
    excluded: Collection[str] = (),
    previous_placement: Placement | None = None,
    memory: Literal["keep", "release"] = "keep",
    budget_bytes: int | None = None,
    forwarding: bool = False,
    group_size: int | None = None,
) -> PlanSummary:
    """Plan the change from `previous`, placed in node order unless said otherwise, to `current`.

    `group_size`: consecutive ranks that share a node where they fit; by default those of a tp group.
    With policy ``paper`` every dp group has its own source, which no plan of ours would do: with dp the bottleneck is
    counted, and nothing is written out.

    Raises:
        PlanError: the change does not fit the topology or the budget.
    """
    where = previous_placement or topology.slots[: previous.config.num_ranks]
    table = model_atoms(previous, current)
    if policy == "paper":
        free = [slot for slot in topology.slots if slot.node not in excluded]
        layers = previous.model.num_layers
        sketch = paper_sketch(table, layers, previous.config, current.config, free, where, topology)
    else:
        sketch = place_atoms(
            table, topology.slots, where, topology,
            group_size=group_size or current.config.tp, excluded=excluded, pack=pack, least=least,
        )
    needed, common = table.needed_bytes(), table.common_bytes()
    kept = [0] * current.config.num_ranks
    for rank, worker in sketch.pairs:
        kept[rank] = int(common[rank, worker])
    basis = (previous, current, topology, where, sketch, policy, tuple(kept), tuple(map(int, needed)))
    inside = max((int(n) - k for n, k in zip(needed, kept, strict=True)), default=0) / FABRIC_BYTES_PER_S
    isolated = policy == "paper" and max(previous.config.dp, current.config.dp) > 1
    if isolated or max(len(where), len(sketch.placement)) > MAX_LISTED:
        return PlanSummary(*basis, max(sketch.bottleneck_s, inside))
    slots, old, new = by_worker(previous.layout(), where, current.layout(), sketch.placement)
    plan = make_plan(old, new, nodes=node_numbers(slots), budget_bytes=budget_bytes, forwarding=forwarding)
    traffic = traffic_of(plan, slots, topology)
    mode: Literal["keep", "release"] = memory if budget_bytes is None else "release"
    return PlanSummary(
        *basis, max(traffic.seconds, inside), traffic.between, traffic.ports, peak_bytes(plan, old, new, mode),
        buffer_bytes(plan),
        tuple(slots), len(plan.rounds), num_transfers(plan), plan.digest,
    )
