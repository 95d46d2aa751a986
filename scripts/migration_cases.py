"""The states and reconfigurations that `bench_migration.py` measures: a GPT of any size and Table II of the paper.

A state is one logical copy of parameters and optimizer: bf16 parameters with an fp32 master copy and Adam's two fp32
moments, 14 bytes per parameter, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.topology import Node, Slot, Topology
from etc_agent.planner.placing.placement import place
from etc_agent.planner.transfers.migration import make_plan
from etc_agent.planner.transfers.plan import MigrationPlan
from etc_agent.state.boxes import Box
from etc_agent.state.layout import Layout, LogicalTensor, Manifest, Shard

_COPIES = (("param", "bfloat16", 2), ("master", "float32", 4), ("exp_avg", "float32", 4), ("exp_avg_sq", "float32", 4))
_BYTES_PER_PARAMETER = 14
_NUM_LAYERS = 8
_VOCABULARY = 8192

CONFIGS = (
    "PP2TP1->PP4TP1",
    "PP2TP2->PP1TP4",
    "PP2TP1DP2->PP2TP2DP1",
    "PP1TP1DP2->PP1TP1DP4",
    "PP2TP2->PP2TP4",
    "PP2TP4->PP2TP2",
    "PP4TP2->PP2TP4",
)
"""Table II of the paper, scaled to 4 and 8 workers."""


@dataclass(frozen=True, slots=True)
class Case:
    """One reconfiguration of one state. Entry i of `previous` and of `current` is worker i's manifest; rank r of the
    old config is worker r, that of the new one ``worker_of_rank[r]``."""

    name: str
    state_bytes: int
    old: ParallelConfig
    new: ParallelConfig
    previous: Layout
    current: Layout
    worker_of_rank: tuple[int, ...]

    @property
    def num_workers(self) -> int:
        return len(self.previous)

    def plan(self, round_bytes: int) -> MigrationPlan:
        return make_plan(self.previous, self.current, round_bytes=round_bytes)


def make_case(text: str, state_bytes: int) -> Case:
    """The case ``OLD->NEW`` of a GPT whose parameters and optimizer take about `state_bytes`; ranks are placed on
    workers so that least is moved."""
    old, new = (ParallelConfig.parse(part) for part in text.split("->"))
    hidden = _hidden_for(state_bytes)
    workers = max(old.num_ranks, new.num_ranks)
    slots = tuple(Slot("host", index) for index in range(workers))
    previous, current = gpt_layout(hidden, old), gpt_layout(hidden, new)
    sketch = place(current, slots, previous, slots[: old.num_ranks], Topology((Node("host", workers),)))
    by_worker: list[Manifest] = [()] * workers
    for rank, slot in enumerate(sketch.placement):
        by_worker[slot.index] = current[rank]
    joined = (*previous, *[()] * (workers - len(previous)))
    total = sum(t.itemsize * _elements(t.shape) for t in {s.tensor for m in previous for s in m})
    return Case(text, total, old, new, joined, tuple(by_worker), tuple(slot.index for slot in sketch.placement))


def gpt_layout(hidden: int, config: ParallelConfig) -> Layout:
    """Megatron's layout: layers over pp, matrices over tp by rows or columns, vectors of row-cut layers on every rank,
    embedding on the first stage and head on the last."""
    layout: list[Manifest] = []
    for rank in range(config.num_ranks):
        at = config.coordinate(rank)
        shards: list[Shard] = []
        for name, shape, dim in _parameters(hidden):
            if _stage(name, config.pp) != at.pp:
                continue
            box = _cut(shape, dim, at.tp, config.tp)
            shards += [
                Shard(LogicalTensor(f"{name}.{copy}", shape, dtype, itemsize), box) for copy, dtype, itemsize in _COPIES
            ]
        layout.append(tuple(shards))
    return tuple(layout)


def tp_dim(name: str) -> int | None:
    """The dim of a tensor that is cut over tp, by its name in a layout."""
    return {parameter: dim for parameter, _, dim in _parameters(1)}[name.rpartition(".")[0]]


def _parameters(hidden: int) -> list[tuple[str, tuple[int, ...], int | None]]:
    """(name, shape, dim cut over tp)."""
    found: list[tuple[str, tuple[int, ...], int | None]] = [("embedding", (_VOCABULARY, hidden), 0)]
    for layer in range(_NUM_LAYERS):
        prefix = f"layers.{layer}."
        found += [
            (prefix + "norm1", (hidden,), None),
            (prefix + "qkv", (3 * hidden, hidden), 0),
            (prefix + "proj", (hidden, hidden), 1),
            (prefix + "norm2", (hidden,), None),
            (prefix + "fc1", (4 * hidden, hidden), 0),
            (prefix + "fc1.bias", (4 * hidden,), 0),
            (prefix + "fc2", (hidden, 4 * hidden), 1),
            (prefix + "fc2.bias", (hidden,), None),
        ]
    return [*found, ("norm", (hidden,), None), ("head", (_VOCABULARY, hidden), 0)]


def _hidden_for(state_bytes: int) -> int:
    """The multiple of 32 whose model comes closest: 12 layers h^2 + 2 vocabulary h parameters."""
    return min(
        range(32, 16384, 32),
        key=lambda h: abs((12 * _NUM_LAYERS * h * h + 2 * _VOCABULARY * h) * _BYTES_PER_PARAMETER - state_bytes),
    )


def _stage(name: str, pp: int) -> int:
    if name.startswith("layers."):
        return int(name.split(".")[1]) * pp // _NUM_LAYERS
    return 0 if name == "embedding" else pp - 1


def _cut(shape: tuple[int, ...], dim: int | None, part: int, parts: int) -> Box:
    offset, extent = [0] * len(shape), list(shape)
    if dim is not None:
        extent[dim] //= parts
        offset[dim] = part * extent[dim]
    return Box(tuple(offset), tuple(extent))


def _elements(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
