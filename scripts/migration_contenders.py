"""What `bench_migration.py` runs in each worker process: the migration, and what it is compared with.

*local*: what stays on its worker but changes place in `keep` mode, copied alone: the wire time does not contain it.
*wire*: the same (source, destination, bytes) matrix as one raw gloo message per pair, on buffers already touched.
*dcp*: PyTorch's distributed checkpoint of the same state, saved by the old ranks and loaded by the new ones.
"""

from __future__ import annotations

import datetime
import gc
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from migration_cases import Case, make_case, tp_dim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as Cut

from etc_agent.migration.keep import KeepingMigration
from etc_agent.migration.memory.binding import Binder
from etc_agent.migration.memory.bits import copy_bits
from etc_agent.migration.memory.pages import prefault
from etc_agent.migration.memory.shared import SharedMemory
from etc_agent.migration.release import ReleasingMigration
from etc_agent.migration.release_plan import plan_release
from etc_agent.migration.report import MigrationReport
from etc_agent.migration.schedule import schedule_for
from etc_agent.planner.transfers.plan import MigrationPlan
from etc_agent.state.layout import Manifest, Shard

_TIMEOUT_S = 300.0
_KEEP_ROUND_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Measured:
    """One worker's seconds per contender, one entry per repeat, and those of its cores; and memory held over what it
    has to hold at least."""

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    moved_bytes: int
    staging_bytes: int
    peak_over_max: float
    rss_peak_over_max: float


class Bench:
    """One worker of one case."""

    def __init__(self, rank: int, store: dist.Store, case: Case) -> None:
        self.rank, self.case = rank, case
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore("raw", store), rank, case.num_workers, datetime.timedelta(seconds=_TIMEOUT_S)
        )
        self._store = store
        self.seconds: dict[str, list[float]] = {}
        self.cpu_seconds: dict[str, list[float]] = {}

    def timed(self, name: str, action: Callable[[], Any]) -> Any:
        """Run together with all other workers; the time is this worker's, from the common start to its end."""
        self._group.barrier().wait()
        cpu_start, start = time.process_time(), time.perf_counter()
        value = action()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        self.cpu_seconds.setdefault(name, []).append(time.process_time() - cpu_start)
        self._group.barrier().wait()
        return value

    def wire(self, plan: MigrationPlan, repeats: int) -> None:
        matrix: Counter[tuple[int, int]] = Counter()
        for transfers in plan.rounds:
            for t in transfers:
                matrix[t.source, t.target] += t.num_bytes
        mine = {pair: size for pair, size in matrix.items() if self.rank in pair}
        buffers = {pair: torch.ones(size, dtype=torch.uint8) for pair, size in mine.items()}

        def replay() -> None:
            works = [self._group.recv([b], pair[0], 1) for pair, b in buffers.items() if pair[1] == self.rank]
            works += [self._group.send([b], pair[1], 1) for pair, b in buffers.items() if pair[0] == self.rank]
            for work in works:
                work.wait()

        replay()
        for _ in range(repeats):
            self.timed("wire", replay)

    def keep(self, plan: MigrationPlan, repeats: int, *, shared: bool) -> int:
        name = "keep" if shared else "keep over gloo"
        sources = _filled(self.case.previous[self.rank], self.rank)
        memory = SharedMemory(plan, self.rank)
        targets = memory.tensors | {s: sources[s] for s in self.case.current[self.rank] if s in sources}
        migration = KeepingMigration(
            plan, self.rank, sources, targets, self._group, timeout_s=_TIMEOUT_S, memory=memory if shared else None
        )
        migration.prepare()
        for _ in range(repeats):
            self.timed(name, migration.run)
        if shared:
            local = Binder(sources.__getitem__, targets.__getitem__, "cpu").bind_local(
                schedule_for(plan, self.rank).refers
            )
            for _ in range(repeats):
                self.timed("local", lambda: copy_bits(local.copy_to, local.copy_from))
        return migration.staging_bytes

    def release(self, repeats: int) -> tuple[float, float]:
        """Returns the peak of what was tracked, and of resident memory, over the larger of old and new state."""
        case = self.case
        plan = plan_release(case.previous, case.current)
        floor = max(sum(s.num_bytes for s in layout[self.rank]) for layout in (case.previous, case.current))
        tracked = resident = 0
        for _ in range(repeats):
            gc.collect()
            _reset_peak()
            before = _status_bytes("VmRSS")
            sources = _filled(case.previous[self.rank], self.rank)
            migration = ReleasingMigration(plan, self.rank, sources, self._group, timeout_s=_TIMEOUT_S)
            migration.prepare()
            report = self.timed("release", migration.run)
            resident = max(resident, _status_bytes("VmHWM") - before)
            tracked = max(tracked, *(point.held_bytes for point in report.timeline))
            del migration, sources
        return tracked / max(1, floor), resident / max(1, floor)

    def checkpoint(self, folder: Path, name: str, threads: int, repeats: int, *, sync: bool) -> None:
        """Save by the old ranks and load by the new ones, in processes that stay."""
        case = self.case
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"{name}{threads}", self._store), rank=self.rank, world_size=case.num_workers
        )
        saved = self._distributed(case.previous, list(range(case.old.num_ranks)), case.old)
        loaded = self._distributed(case.current, list(case.worker_of_rank), case.new)
        savers = dist.new_group(list(range(case.old.num_ranks)))
        loaders = dist.new_group(sorted(case.worker_of_rank))
        for repeat in range(repeats + 1):
            path = folder / f"{name}-{repeat}"

            def save_and_load(path: Path = path) -> None:
                if saved:
                    writer = dcp.FileSystemWriter(path, thread_count=threads, sync_files=sync)
                    dcp.save(saved, storage_writer=writer, process_group=savers, no_dist=False)
                dist.barrier()
                if loaded:
                    dcp.load(loaded, storage_reader=dcp.FileSystemReader(path), process_group=loaders)

            if repeat == 0:
                save_and_load()  # the first one imports, plans and warms up
            else:
                self.timed(name, save_and_load)
            dist.barrier()
            if self.rank == 0:
                shutil.rmtree(path)
        dist.destroy_process_group()

    def _distributed(self, layout: tuple[Manifest, ...], workers: list[int], config: Any) -> dict[str, DTensor]:
        """This worker's shards as DTensors on its tensor-parallel group."""
        mesh = DeviceMesh(
            "cpu", torch.tensor(workers).view(config.pp, config.dp, config.tp), mesh_dim_names=("pp", "dp", "tp")
        )
        found = {}
        for shard, tensor in _filled(layout[self.rank], self.rank).items():
            dim = tp_dim(shard.tensor.name)
            cut: Placement = Replicate() if dim is None else Cut(dim)
            found[shard.tensor.name] = DTensor.from_local(tensor, mesh["dp", "tp"], [Replicate(), cut], run_check=False)
        return found


def measure(
    rank: int, store: dist.Store, text: str, state_bytes: int, repeats: int, folders: Mapping[str, Path]
) -> Measured:
    """All contenders of one case, on one worker.

    Args:
        folders: ``tmpfs`` and ``disk`` to put checkpoints into; empty to leave them out.
    """
    torch.set_num_threads(1)
    case = make_case(text, state_bytes)
    bench = Bench(rank, store, case)
    plan = case.plan(_KEEP_ROUND_BYTES)
    bench.wire(plan, repeats)
    bench.keep(plan, repeats, shared=True)
    staging = bench.keep(plan, repeats, shared=False)
    gc.collect()
    tracked, resident = bench.release(repeats)
    for kind, folder in folders.items():
        for threads in (1, 2):
            bench.checkpoint(folder, f"dcp_{kind}_{threads}", threads, repeats, sync=kind == "disk")
    return Measured(bench.seconds, bench.cpu_seconds, plan.moved_bytes, staging, tracked, resident)


def release_once(rank: int, store: dist.Store, case: Case) -> MigrationReport:
    """One migration in `release` mode, on one worker."""
    torch.set_num_threads(1)
    group = dist.ProcessGroupGloo(store, rank, case.num_workers, datetime.timedelta(seconds=_TIMEOUT_S))
    sources = _filled(case.previous[rank], rank)
    migration = ReleasingMigration(
        plan_release(case.previous, case.current), rank, sources, group, timeout_s=_TIMEOUT_S
    )
    migration.prepare()
    return migration.run()


def _filled(manifest: Manifest, rank: int) -> dict[Shard, torch.Tensor]:
    tensors = {}
    for shard in manifest:
        tensors[shard] = torch.empty(shard.box.shape, dtype=getattr(torch, shard.tensor.dtype))
        prefault(tensors[shard])
        tensors[shard].fill_(rank + 1)
    return tensors


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _reset_peak() -> None:
    """Let VmHWM start again from what is resident now."""
    fd = os.open("/proc/self/clear_refs", os.O_WRONLY)
    try:
        os.write(fd, b"5")
    finally:
        os.close(fd)
