"""What the first step of a new generation costs in a process that is already warm, beyond a usual step.

    torchrun --nproc-per-node 4 scripts/bench_first_step.py --layers 8 --hidden 256
    torchrun --nproc-per-node 4 scripts/bench_first_step.py --layers 8 --hidden 256 --compute dtensor

Each config in turn gets a new mesh, model and optimizer state in the same processes, then trains a few steps on the
main thread. `--compute dtensor` uses PyTorch's own parallel styles and AdamW, which work through DTensor's dispatcher.
Wall-clock times are those of rank 0. On a busy machine look at CPU time: the largest of any rank's extra CPU time in
its first step. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import time
from dataclasses import dataclass
from itertools import cycle, islice

import torch
import torch.distributed as dist
from gpt import training
from gpt.data import ByteSamples
from gpt.model import Gpt
from gpt.options import GptOptions
from gpt.plain import apply_update, batch_of, build_real
from gpt.training import train
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.context import ParallelContext


@dataclass(frozen=True, slots=True)
class Measurement:
    """One generation, in milliseconds: the build, its first step, and the median of the others."""

    config: str
    build_ms: float
    first_ms: float
    later_ms: float
    later_cpu_ms: float
    penalty_cpu_ms: float

    @property
    def penalty_ms(self) -> float:
        return self.first_ms - self.later_ms


def dtensor_styles(model: Gpt, mesh: DeviceMesh) -> None:
    """PyTorch's own way: every product is a DTensor operation."""
    plan = {f"layers.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")}
    plan |= {f"layers.*.{name}": RowwiseParallel() for name in ("out", "down")}
    if model.is_first:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
    if model.is_last:
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, plan)


def measure(
    options: GptOptions, config: ParallelConfig, generation: int, data: ByteSamples, profile: cProfile.Profile | None
) -> Measurement:
    """Train `options.steps` steps in a new generation of `config`."""
    start = time.perf_counter()
    mesh = init_device_mesh("cpu", (config.pp, config.dp, config.tp), mesh_dim_names=("pp", "dp", "tp"))
    parallel = ParallelContext(config, mesh, dist.get_rank(), torch.device("cpu"), generation, options.global_batch)
    state = build_real(options, parallel)
    build_ms = (time.perf_counter() - start) * 1e3
    durations, cpu_durations = [], []
    for step in range(options.steps):
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        if profile and step == 0:
            profile.enable()
        train(state, parallel, batch_of(data, step, parallel))
        apply_update(state)
        if profile and step == 0:
            profile.disable()
        durations.append((time.perf_counter() - start) * 1e3)
        cpu_durations.append((time.process_time() - cpu_start) * 1e3)
    later_cpu_ms = statistics.median(cpu_durations[1:])
    penalty_cpu_ms = torch.tensor(cpu_durations[0] - later_cpu_ms)
    dist.all_reduce(penalty_cpu_ms, op=dist.ReduceOp.MAX)
    return Measurement(
        str(config), build_ms, durations[0], statistics.median(durations[1:]), later_cpu_ms, penalty_cpu_ms.item()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    GptOptions.add_arguments(parser)
    parser.set_defaults(steps=6)
    parser.add_argument("--compute", choices=("local", "dtensor"), default="local")
    parser.add_argument("--configs", default="PP2TP2DP1,PP1TP2DP2,PP1TP1DP4,PP1TP4DP1", help="of one size each")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="profile the first steps on rank 0")
    arguments = parser.parse_args()
    options = GptOptions.from_arguments(arguments)
    torch.set_num_threads(1)
    if arguments.compute == "dtensor":
        training.tensor_parallel = dtensor_styles
        training.LocalAdamW = torch.optim.AdamW  # type: ignore[misc]
    data = ByteSamples(options.data, options.sequence, options.seed)
    dist.init_process_group("gloo")
    is_reporter = int(os.environ["RANK"]) == 0
    configs = [ParallelConfig.parse(text) for text in arguments.configs.split(",")]
    measurements = []
    for generation, config in enumerate(islice(cycle(configs), arguments.generations), start=1):
        profile = cProfile.Profile() if arguments.profile and is_reporter else None
        measurements.append(measure(options, config, generation, data, profile))
        if is_reporter:
            last = measurements[-1]
            print(
                f"{last.config}  build {last.build_ms:5.0f} ms  first step {last.first_ms:5.0f} ms  later "
                f"{last.later_ms:5.0f} ms  penalty {last.penalty_ms:5.0f} ms  CPU {last.later_cpu_ms:5.0f} ms, "
                f"penalty {last.penalty_cpu_ms:5.0f} ms", flush=True,
            )
        if profile:
            pstats.Stats(profile).sort_stats("cumulative").print_stats(25)
    if is_reporter:
        changes = measurements[1:]
        summary = {
            "compute": arguments.compute,
            "median_penalty_ms": round(statistics.median(m.penalty_ms for m in changes), 1),
            "largest_penalty_ms": round(max(m.penalty_ms for m in changes), 1),
            "median_penalty_cpu_ms": round(statistics.median(m.penalty_cpu_ms for m in changes), 1),
            "largest_penalty_cpu_ms": round(max(m.penalty_cpu_ms for m in changes), 1),
            "changes": [{"config": m.config, "first_ms": m.first_ms, "later_ms": m.later_ms} for m in changes],
        }
        print(json.dumps(summary))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
