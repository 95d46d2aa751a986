"""What each worker holds while a migration runs, in both modes: the picture of the paper's Fig. 12.

    python scripts/memory_picture.py --case "PP2TP4->PP2TP2" --mb 256 --trace out/migration.json

Runs a real migration in `release` mode in as many processes as it has workers; `keep` holds old and new state from
start to end.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch.distributed as dist
from bench_migration import in_workers
from migration_cases import Case, make_case
from migration_contenders import release_once

from etc_agent.migration.report import MemoryPoint, MigrationReport
from etc_agent.migration.trace import write_trace

_MB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="PP2TP4->PP2TP2")
    parser.add_argument("--mb", type=int, default=256, help="size of the state")
    parser.add_argument("--out", type=Path, default=Path("out/migration-memory.svg"))
    parser.add_argument("--trace", type=Path, help="write a Chrome trace of the same run here, for Perfetto")
    options = parser.parse_args()
    case = make_case(options.case, options.mb << 20)
    reports = in_workers(_report, case.num_workers, options.case, options.mb << 20)
    timelines = [report.timeline for report in reports]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    _draw(case, timelines, options.out)
    for worker, points in enumerate(timelines):
        old, new = _sizes(case, worker)
        print(f"worker {worker}: old {old / _MB:.1f} MB, new {new / _MB:.1f} MB, "
              f"peak {max(p.held_bytes for p in points) / _MB:.1f} MB")
    print(options.out)
    if options.trace is not None:
        write_trace(options.trace, dict(enumerate(reports)))
        print(options.trace)


def _report(rank: int, store: dist.Store, text: str, state_bytes: int) -> MigrationReport:
    return release_once(rank, store, make_case(text, state_bytes))


def _sizes(case: Case, worker: int) -> tuple[int, int]:
    old, new = (sum(shard.num_bytes for shard in layout[worker]) for layout in (case.previous, case.current))
    return old, new


def _draw(case: Case, timelines: Sequence[Sequence[MemoryPoint]], path: Path) -> None:
    figure, axes = plt.subplots(1, len(timelines), figsize=(2.6 * len(timelines), 2.8), sharey=True)
    start = min(points[0].at_s for points in timelines)
    end = max(points[-1].at_s for points in timelines)
    for worker, (axis, points) in enumerate(zip(axes, timelines, strict=True)):
        old, new = _sizes(case, worker)
        times = [(point.at_s - start) * 1e3 for point in points] + [(end - start) * 1e3]
        held = [point.held_bytes / _MB for point in points]
        axis.step(times, [*held, held[-1]], where="post", label="release")
        kept = sum(s.num_bytes for s in set(case.previous[worker]) & set(case.current[worker]))
        axis.axhline((old + new - kept) / _MB, color="tab:red", linestyle="--", label="keep")
        axis.axhline(max(old, new) / _MB, color="grey", linestyle=":", label="max(old, new)")
        axis.set_title(f"worker {worker}", fontsize=9)
        axis.set_xlabel("ms")
    axes[0].set_ylabel("held, MB")
    axes[0].set_ylim(bottom=0)
    axes[-1].legend(fontsize=7)
    figure.suptitle(f"{case.name}, {case.state_bytes / _MB:.0f} MB of state", fontsize=10)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
