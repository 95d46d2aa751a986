"""How long a reconfiguration stops training, and against what: the wire itself, and PyTorch's distributed checkpoint.

    python scripts/bench_migration.py                      every case, about 20 minutes on two cores
    python scripts/bench_migration.py --mb 64 --case "PP2TP1->PP4TP1" --repeats 3

All contenders of a case run one after the other in the same worker processes, on the same state. A time is that of the
slowest worker, the median over repeats. `execution_s` is that of the migration as users get it: workers of one host
share the memory of new tensors (`keep`); the same over gloo alone is `execution_gloo_s`. `execution_cpu_s` and
`wire_cpu_s` are what all workers' cores spent, which other work on the machine changes less. `local_s` is the time to
copy what stays on its worker and changes place, which `keep` has to do beside the wire's work. `restart_s` is a
checkpoint on tmpfs plus the start of that many workers by torchrun. `stop_overhead_ms` and `first_step_penalty_ms` are
those of a real job's switches to 4 workers (`migration_job.py`), the same in every row. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from migration_cases import CONFIGS, make_case
from migration_contenders import Measured, measure
from migration_job import JobCosts, measure_job

T = TypeVar("T")
_STARTED = "import torch.distributed as d; d.init_process_group('gloo'); d.barrier(); d.destroy_process_group()"


def main() -> None:
    options = _options()
    costs = None if options.no_job else measure_job(options.config, Path(__file__).parent.parent / "out")
    rows: list[dict[str, Any]] = []
    starts: dict[int, float] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as tmpfs, tempfile.TemporaryDirectory(dir=options.disk) as disk:
        for megabytes in options.mb:
            for text in options.case:
                workers = make_case(text, megabytes << 20).num_workers
                with_dcp = megabytes <= options.dcp_max_mb
                folders = {"tmpfs": Path(tmpfs), "disk": Path(disk)} if with_dcp else {}
                if with_dcp and workers not in starts:
                    starts[workers] = _start_s(workers)
                outcomes = in_workers(measure, workers, text, megabytes << 20, options.repeats, folders)
                rows += _rows(text, megabytes, outcomes, starts.get(workers), costs)
                for row in rows[-2:]:
                    print(_readable(row), flush=True)
    if costs:
        print(
            f"a job's switches to 4 workers: {costs.stop_overhead_ms:.0f} ms beside the migration, first step "
            f"{costs.first_step_penalty_ms:.0f} ms more than usual (median of {costs.changes})"
        )
    print(f"on {os.cpu_count()} cores of {platform.processor() or platform.machine()}, {options.repeats} repeats")
    for line in _summary(rows):
        print(line)
    print(json.dumps({"cases": rows}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[64, 512, 2048], help="state sizes")
    parser.add_argument("--case", nargs="+", default=list(CONFIGS), help='reconfigurations, as in "PP2TP1->PP4TP1"')
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dcp-max-mb", type=int, default=512, help="largest state that is also checkpointed")
    parser.add_argument("--config", type=Path, default=Path("configs/gpt-tiny.yaml"), help="the job that switches")
    parser.add_argument("--no-job", action="store_true", help="leave stop_overhead_ms and first_step_penalty_ms out")
    parser.add_argument("--disk", type=Path, default=Path.cwd(), help="a folder on the disk to compare with")
    return parser.parse_args()


def _rows(
    text: str, megabytes: int, outcomes: list[Measured], start_s: float | None, costs: JobCosts | None
) -> list[dict[str, Any]]:
    """One row per mode."""

    def median_s(name: str) -> float | None:
        per_worker = [outcome.seconds[name] for outcome in outcomes if name in outcome.seconds]
        if not per_worker:
            return None
        return statistics.median(max(repeat) for repeat in zip(*per_worker, strict=True))

    def median_cpu_s(name: str) -> float:
        per_worker = [outcome.cpu_seconds[name] for outcome in outcomes]
        return statistics.median(sum(repeat) for repeat in zip(*per_worker, strict=True))

    def best_s(kind: str) -> float | None:
        return min((s for threads in (1, 2) if (s := median_s(f"dcp_{kind}_{threads}")) is not None), default=None)

    tmpfs_s, disk_s = best_s("tmpfs"), best_s("disk")
    shared = {
        "mb": megabytes,
        "workers": len(outcomes),
        "moved_mb": round(outcomes[0].moved_bytes / 2**20, 1),
        "wire_s": median_s("wire"),
        "wire_cpu_s": median_cpu_s("wire"),
        "local_s": median_s("local"),
        "dcp_tmpfs_s": tmpfs_s,
        "dcp_disk_s": disk_s,
        "restart_s": start_s + tmpfs_s if start_s is not None and tmpfs_s is not None else None,
        "stop_overhead_ms": costs.stop_overhead_ms if costs else None,
        "first_step_penalty_ms": costs.first_step_penalty_ms if costs else None,
    }
    resident = max(o.rss_peak_over_max for o in outcomes) if megabytes >= 2048 else 0.0
    peak = max(resident, *(o.peak_over_max for o in outcomes))
    return [
        {"name": text, "mode": "keep", **shared, "execution_s": median_s("keep"),
         "execution_cpu_s": median_cpu_s("keep"), "execution_gloo_s": median_s("keep over gloo"),
         "peak_over_max": None},
        {"name": text, "mode": "release", **shared, "execution_s": median_s("release"),
         "execution_cpu_s": median_cpu_s("release"), "execution_gloo_s": median_s("release"),
         "peak_over_max": round(peak, 3)},
    ]


def _readable(row: Mapping[str, Any]) -> str:
    def ms(name: str) -> str:
        return "-" if row[name] is None else f"{row[name] * 1e3:.0f}"

    return (
        f"{row['name']:<24} {row['mode']:<8} {row['mb']:>5} MB  moved {row['moved_mb']:>7} MB  "
        f"execution {ms('execution_s'):>5} (gloo {ms('execution_gloo_s')})  wire {ms('wire_s'):>5}  "
        f"local {ms('local_s'):>4}  cores {ms('execution_cpu_s')} / {ms('wire_cpu_s')}  "
        f"dcp tmpfs {ms('dcp_tmpfs_s')} disk {ms('dcp_disk_s')}  restart {ms('restart_s')} ms  "
        f"peak {row['peak_over_max'] or '-'}"
    )


def _summary(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Geometric means per size and mode, over the cases in which anything has to move."""
    lines = []
    moving = [row for row in rows if row["moved_mb"] > 0]
    for megabytes, mode in sorted({(row["mb"], row["mode"]) for row in moving}):
        group = [row for row in moving if (row["mb"], row["mode"]) == (megabytes, mode)]
        ratios = [
            f"{name.removesuffix('_s')} / execution {_geometric(row[name] / row['execution_s'] for row in group):.2f}"
            for name in ("wire_s", "dcp_tmpfs_s", "dcp_disk_s", "restart_s")
            if all(row[name] is not None for row in group)
        ]
        worst = max(row["execution_s"] / row["wire_s"] for row in group)
        lines.append(f"{megabytes} MB {mode}: {', '.join(ratios)}; worst execution / wire {worst:.2f}")
    return lines


def _geometric(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def _start_s(workers: int) -> float:
    """From the launch of torchrun to the end of `workers` processes that only met each other."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(_STARTED)
        script.flush()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        start = time.perf_counter()
        subprocess.run([*command, script.name], check=True, capture_output=True, timeout=300)
        return time.perf_counter() - start


def in_workers(function: Callable[..., T], workers: int, *args: Any) -> list[T]:
    """``function(rank, store, *args)`` in fresh processes, all ended on return."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = []
    for rank in range(workers):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_worker, args=(theirs, function, rank, store.port, args), daemon=True)
        child.start()
        theirs.close()
        children.append((child, ours))
    try:
        return [_answer(pipe) for _, pipe in children]
    finally:
        for child, _ in children:
            child.join(5)
            if child.is_alive():
                child.kill()


def _answer(pipe: multiprocessing.connection.Connection) -> Any:
    failed, value = pickle.loads(pipe.recv_bytes())
    if failed:
        raise RuntimeError(f"a worker failed:\n{value}")
    return value


def _worker(
    pipe: multiprocessing.connection.Connection,
    function: Callable[..., Any],
    rank: int,
    port: int,
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        answer = (False, function(rank, dist.TCPStore("127.0.0.1", port, is_master=False), *args))
    except Exception:
        answer = (True, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    main()
