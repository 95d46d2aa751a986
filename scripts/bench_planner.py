"""How fast the planner is, and how good its plans are. The last line is one JSON object.

Times are the least of several runs of the whole chain (atoms, cost, sketch, placement), wall clock, one thread:
    OMP_NUM_THREADS=1 python scripts/bench_planner.py
"""

from __future__ import annotations

import json
import platform
import resource
import time
from collections.abc import Callable

import click

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.topology import Node, Topology, node_numbers
from etc_agent.planner.paper import paper_sketch
from etc_agent.planner.placing.model_atoms import model_atoms
from etc_agent.planner.placing.placement import Sketch, place_atoms
from etc_agent.planner.transfers.classes import Side
from etc_agent.planner.transfers.effect import by_worker
from etc_agent.planner.transfers.instructions import Instructor
from etc_agent.planner.transfers.migration import ROUND_BYTES, ROUND_TRANSFERS
from etc_agent.simulator.random_cases import compare_with_brute_force
from etc_agent.state.model import ModelDescription
from etc_agent.state.sharding import Sharding

GIGA = 1e9
PAIRS_64 = ["PP8TP8 PP16TP4", "PP16TP4 PP8TP8", "PP8TP4 PP8TP8", "PP4TP8 PP8TP8", "PP8TP8 PP4TP8", "PP16TP2 PP16TP4"]
PAIRS_1024 = ["PP8TP8DP16 PP16TP8DP8", "PP8TP8DP14 PP8TP8DP16", "PP16TP4DP16 PP8TP8DP16", "PP16TP8DP8 PP16TP8DP6"]
PAIRS_16384 = ["PP16TP8DP128 PP32TP8DP64", "PP16TP8DP120 PP16TP8DP128", "PP16TP8DP128 PP8TP8DP250",
               "PP16TP4DP256 PP32TP4DP127"]
TABLE_2 = [
    ("PP8TP1", "PP16TP1", 32, 25.4, 0.254),
    ("PP4TP2", "PP4TP4", 36, 30.7, 0.307),
    ("PP4TP4", "PP4TP2", 36, 30.7, 0.307),
    ("PP4TP2", "PP6TP4", 36, 40.2, 0.402),
    ("PP6TP4", "PP4TP2", 36, 40.2, 0.402),
    ("PP4TP2DP3", "PP4TP8", 36, 15.4, 0.154),
]
"""Previous, current, layers; the bytes (GB) and the seconds to reach."""

LARGE = ModelDescription(
    "128 layers", num_layers=128, hidden=16384, num_heads=128, num_kv_heads=8, vocab=128256, ffn_hidden=53248,
    gated=True,
)


def paper_model(num_layers: int) -> ModelDescription:
    """The model of Table II: "GPT3-32B" with hidden 3072, which has 4.23 billion parameters.

    Matrices and embeddings alone, as the bytes to reach count them; biases and norms would add 0.03 %.
    """
    return ModelDescription(
        "table 2", num_layers=num_layers, hidden=3072, num_heads=32, vocab=50304, tied=True, norm="none", bias=False
    )


def cluster(num_nodes: int, num_slots: int, *, shared: bool = True) -> Topology:
    return Topology(tuple(Node(f"n{i:04}", num_slots, num_slots, 12.5e9, shared) for i in range(num_nodes)))


def plan(model: ModelDescription, before: str, after: str, nodes: Topology) -> Sketch:
    """Atoms, cost, sketch and placement from nothing."""
    previous, current = (ParallelConfig.parse(text) for text in (before, after))
    table = model_atoms(Sharding(model, previous), Sharding(model, current))
    return place_atoms(table, nodes.slots, nodes.slots[: previous.num_ranks], nodes, group_size=current.tp)


def least_s(action: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best


def speeds(pairs: list[str], model: ModelDescription, nodes: Topology, repeats: int) -> float:
    """Mean over `pairs` of the least time, in seconds."""
    times = []
    for pair in pairs:
        before, after = pair.split()
        times.append(least_s(lambda before=before, after=after: plan(model, before, after, nodes), repeats))
        print(f"  {before:>14} -> {after:<14} {times[-1] * 1e3:9.2f} ms")
    return sum(times) / len(times)


def instructions_s(nodes: Topology) -> float:
    """Seconds for the complete instructions of one rank of 16,384 with 128 layers."""
    previous, current = (Sharding(LARGE, ParallelConfig.parse(text)) for text in ("PP16TP8DP128", "PP32TP4DP128"))
    where = nodes.slots[: previous.config.num_ranks]
    placement = place_atoms(model_atoms(previous, current), nodes.slots, where, nodes, group_size=4).placement
    slots, old, new = by_worker(previous.layout(), where, current.layout(), placement)
    sides, node_of, worker = (Side.of(old), Side.of(new)), node_numbers(slots), 5000

    def instruct() -> None:
        instructor = Instructor(worker, *sides, old[worker], new[worker], node_of, forwarding=True)
        instructor.plan(ROUND_BYTES, ROUND_TRANSFERS, max(2, instructor.num_regions), "")

    return least_s(instruct, 2)


def table_2() -> tuple[list[float], list[float]]:
    """(GB moved, time over bound) per row, and beside them what else there is to say."""
    moved, over = [], []
    for before, after, layers, gigabytes, bound in TABLE_2:
        model = paper_model(layers)
        previous, current = (ParallelConfig.parse(text) for text in (before, after))
        table = model_atoms(Sharding(model, previous), Sharding(model, current))
        shared, own = cluster(32, 4), cluster(32, 4, shared=False)
        where = shared.slots[: previous.num_ranks]
        ours = place_atoms(table, shared.slots, where, shared, least="bytes")
        paper = paper_sketch(table, layers, previous, current, shared.slots, where, shared)
        moved.append(ours.moved_bytes / GIGA)
        over.append(ours.bottleneck_s / bound)
        size = current.tp
        beside = {
            "own NIC": place_atoms(table, own.slots, where, own, least="bytes"),
            "tp in nodes": place_atoms(table, shared.slots, where, shared, group_size=size),
            "packed": place_atoms(table, shared.slots, where, shared, group_size=size, pack=True),
            "packed, own NIC": place_atoms(table, own.slots, where, own, group_size=size, pack=True),
        }
        print(f"  {before:>9} -> {after:<9} {moved[-1]:6.2f} GB (to reach {gigabytes}), "
              f"busiest NIC {ours.bottleneck_s:.3f} s (bound {bound}); "
              f"policy paper {paper.moved_bytes / GIGA:.2f} GB, {paper.bottleneck_s:.3f} s")
        print("      " + "; ".join(
            f"{name}: {sketch.moved_bytes / GIGA:.1f} GB, {sketch.bottleneck_s:.3f} s, {sketch.num_nodes} nodes"
            for name, sketch in beside.items()
        ))
        assert ours.moved_bytes <= paper.moved_bytes
        assert ours.bottleneck_s <= paper.bottleneck_s * (1 + 1e-6)
    return moved, over


@click.command()
@click.option("--cases", default=500, show_default=True, help="Random small cases to compare with brute force.")
@click.option("--repeats", default=15, show_default=True, help="Runs of each small case; the least time counts.")
def main(cases: int, repeats: int) -> None:
    """Measure the planner."""
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    small = ModelDescription("48 layers", num_layers=48, hidden=3072, num_heads=32, vocab=50304, tied=True, bias=True)
    print("PP x TP = 64")
    ms_64 = speeds(PAIRS_64, small, cluster(16, 8), repeats) * 1e3
    print("1,024 ranks")
    ms_1024 = speeds(PAIRS_1024, LARGE, cluster(128, 8), max(1, repeats // 3)) * 1e3
    print("16,384 ranks, 2,048 nodes")
    s_16384 = speeds(PAIRS_16384, LARGE, cluster(2048, 8), 1)
    rank_s = instructions_s(cluster(2048, 8))
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    print("Table II")
    moved, over = table_2()
    print(f"{cases} random small cases against brute force")
    optimal, worst = compare_with_brute_force(cases)
    print(json.dumps({
        "plan_ms_64": round(ms_64, 2),
        "plan_ms_1024": round(ms_1024, 2),
        "plan_s_16384": round(s_16384, 3),
        "rank_instructions_s_16384": round(rank_s, 3),
        "peak_gib_16384": round(peak_gib, 3),
        "table2_moved_gb": [round(value, 2) for value in moved],
        "table2_time_over_bound": [round(value, 3) for value in over],
        "optimal_fraction": round(optimal, 4),
        "worst_over_optimal": round(worst, 4),
    }))


if __name__ == "__main__":
    main()
