"""What a change of size costs, against restarting the same job from a checkpoint; and what a steady step costs.

Three measurements on one machine, one after the other:

* stop: a job under etc-run changes size again and again. From the end of the last step of the old generation to the end
  of the first step of the new one, less one median step of the new one. Beside it what the stop does not show: all
  time above the median step of its generation, from the request to ten steps after the switch (`lost_s`; of changes
  that start no process, `lost_same_size_s`), and how much slower the steps beside a preparation are (of the same
  changes, `prepare_slowdown_percent`).
* restart: torchrun, the same model, a PyTorch distributed checkpoint on tmpfs, the same changes. The same interval:
  save, end, start, import, load, first step, less one median step.
* steady: a step in a session under etc-run against a step without one under torchrun, rounds alternating; 1.2 times a
  bare 8-byte all-reduce of the same ranks, which is what the vote needs, is taken off.

The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import yaml
from rich.console import Console
from rich.table import Table
from run_demo import Administrator, running

from etc_agent.parallel.config import ParallelConfig
from etc_agent.rendezvous.etcd.client import EtcdClient

ROOT = Path(__file__).resolve().parent.parent
START = "PP2TP1DP1"
CHANGES = ("PP2TP2DP1", "PP1TP2DP2", "PP2TP1DP1", "PP1TP1DP4", "PP2TP2DP1", "PP1TP1DP4", "PP1TP2DP2")
STEADY = "PP1TP1DP4"
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Loss:
    """What one change took from training. `lost_s`: seconds above the median steps. `slowdown`: of a step beside its
    preparation, as a part of the median step; None where no step ended meanwhile. `starts`: it started processes."""

    lost_s: float
    slowdown: float | None
    starts: bool


def stops(
    model: list[str], folder: Path, steps_between: int, shown: Console
) -> tuple[dict[str, list[float]], list[Loss]]:
    """Change -> seconds of stopped training; and all that each change took; from the step log of one job under
    etc-run."""
    job_file, log = folder / "job.yaml", folder / "gpt-tiny.jsonl"
    command = [str(ROOT / "scripts" / "train_gpt.py"), *model, "--steps=100000", f"--log={log}"]
    job_file.write_text(
        yaml.safe_dump({"command": command, "nodes": 1, "workers_per_node": 4, "parallel": {"initial": START}})
    )
    with running(job_file, folder, shown) as job:
        endpoint, run_id = job.endpoint(TIMEOUT_S)
        with EtcdClient([endpoint]) as client:
            administrator = Administrator(client, run_id, shown)
            job.train_until(steps_between, TIMEOUT_S)
            requests = []
            for target in CHANGES:
                requests.append(time.time())
                record = administrator.change(job, target, TIMEOUT_S)
                job.train_until(record.step + steps_between, TIMEOUT_S)
            administrator.close()
        steps = job.steps()
    return _intervals(steps), _losses(steps, requests)


def _losses(steps: list[dict[str, Any]], requests: list[float]) -> list[Loss]:
    """Of each change, in the order of the requests (seconds since the epoch)."""
    durations = [(line, line["time"] - before["time"], before) for before, line in pairwise(steps)]
    switches = [n for n, (line, _, before) in enumerate(durations) if line["generation"] != before["generation"]]
    assert len(switches) == len(requests), f"{len(requests)} requests, {len(switches)} changes"
    found = []
    for switch, request in zip(switches, requests, strict=True):
        line, stopped_s, before = durations[switch]
        old = [(each, s) for each, s, _ in durations[:switch] if each["generation"] == before["generation"]]
        new = [s for each, s, _ in durations[switch + 1 :] if each["generation"] == line["generation"]]
        usual = statistics.median(s for each, s in old if each["time"] <= request)
        beside = [s for each, s in old if each["time"] > request]
        median_new = statistics.median(new)
        lost_s = sum(s - usual for s in beside) + stopped_s - median_new + sum(s - median_new for s in new[:10])
        slowdown = sum(beside) / len(beside) / usual - 1 if beside else None
        sizes = [ParallelConfig.parse(each["config"]).num_ranks for each in (before, line)]
        found.append(Loss(lost_s, slowdown, sizes[1] > sizes[0]))
    return found


def _intervals(steps: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds between the last step of a generation and the first of the next, less a median step of the next."""
    usual = defaultdict(list)
    for before, line in pairwise(steps):
        if before["generation"] == line["generation"]:
            usual[line["generation"]].append(line["time"] - before["time"])
    stopped = defaultdict(list)
    for before, line in pairwise(steps):
        if before["generation"] != line["generation"]:
            assert line["step"] == before["step"] + 1, "a step was lost"
            excess = line["time"] - before["time"] - statistics.median(usual[line["generation"]])
            stopped[f"{before['config']} -> {line['config']}"].append(excess)
    return dict(stopped)


def restarts(model: list[str], steps_each: int, shown: Console) -> dict[str, list[float]]:
    """Change -> seconds, by stopping, saving to tmpfs, starting again with torchrun and loading."""
    shared_memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="etc-run-bench-", dir=shared_memory if shared_memory.is_dir() else None))
    result = defaultdict(list)
    last_step = 0.0
    try:
        for number, config in enumerate((START, *CHANGES)):
            events, step_s = _run_once(model, config, folder, (number + 1) * steps_each, number > 0)
            if number:
                before = (START, *CHANGES)[number - 1]
                result[f"{before} -> {config}"].append(events["first_step"] - last_step - step_s)
                shown.print(f"  restart to {config}: {result[f'{before} -> {config}'][-1]:.2f} s", highlight=False)
            last_step = events["last_step"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return dict(result)


def _run_once(
    model: list[str], config: str, folder: Path, stop_at: int, is_resumed: bool
) -> tuple[dict[str, float], float]:
    """Events of one run of the checkpointing script by time of day, and its median step."""
    log = folder / f"steps-{stop_at}.jsonl"
    arguments = ["--parallel", config, "--save-dir", str(folder / "saved"), "--stop-at", str(stop_at)]
    arguments += ["--steps=100000", f"--step-log={log}", *(["--resume"] if is_resumed else [])]
    output = _torchrun(ParallelConfig.parse(config).num_ranks, "train_gpt_dcp.py", *model, *arguments)
    events = {}
    for line in output.splitlines():
        if line.startswith('{"event"'):
            event = json.loads(line)
            events[event["event"]] = event["time"]
    steps = [json.loads(line)["step_s"] for line in log.read_text().splitlines()]
    return events, statistics.median(steps[1:])


def steady(model: list[str], folder: Path, steps: int, rounds: int, shown: Console) -> dict[str, float]:
    """Seconds of a median step with and without a session, and of a bare all-reduce: medians of alternating rounds."""
    num_ranks = ParallelConfig.parse(STEADY).num_ranks
    medians: dict[str, list[float]] = {"session": [], "plain": [], "all_reduce": []}
    for number in range(rounds):
        common = [*model, f"--steps={steps}"]
        for kind in ("plain", "session") if number % 2 else ("session", "plain"):
            log = folder / f"steady-{kind}-{number}.jsonl"
            if kind == "plain":
                arguments = ["--plain", "--parallel", STEADY, f"--step-log={log}"]
                _torchrun(num_ranks, "train_gpt.py", *common, *arguments)
            else:
                _etc_run(num_ranks, "train_gpt.py", *common, f"--step-log={log}")
            durations = [json.loads(line)["step_s"] for line in log.read_text().splitlines()]
            medians[kind].append(statistics.median(durations[steps // 4 :]))
        output = _torchrun(num_ranks, Path(__file__).name, "--all-reduce", "2000")
        medians["all_reduce"].append(float(output.split()[-1]))
        shown.print(
            "  round {}: session {:.2f} ms, plain {:.2f} ms, all-reduce {:.3f} ms".format(
                number + 1, *(medians[kind][-1] * 1e3 for kind in medians)
            ),
            highlight=False,
        )
    return {kind: statistics.median(values) for kind, values in medians.items()}


def _torchrun(num_ranks: int, script: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return _output([*command, str(ROOT / "scripts" / script), *arguments])


def _etc_run(num_ranks: int, script: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "launcher.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return _output([*command, "--parallel", STEADY, str(ROOT / "scripts" / script), *arguments])


def _output(command: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    if result.returncode:
        raise click.ClickException(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr[-2000:]}")
    return result.stdout


def bare_all_reduce(count: int) -> None:
    """Run by every rank: print the median seconds of an 8-byte gloo all-reduce."""
    dist.init_process_group("gloo")
    ballot, durations = torch.zeros(2, dtype=torch.int32), []
    for _ in range(count):
        start = time.perf_counter()
        dist.all_reduce(ballot, op=dist.ReduceOp.MIN)
        durations.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(statistics.median(durations), flush=True)
    dist.barrier()
    dist.destroy_process_group()


@click.command(help=__doc__)
@click.option("--layers", default=4, show_default=True)
@click.option("--hidden", default=128, show_default=True)
@click.option("--steps-between", default=15, show_default=True, help="Steps in each size.")
@click.option("--steady-steps", default=100, show_default=True, help="Steps of each steady run; 0 leaves it out.")
@click.option("--rounds", default=3, show_default=True, help="Alternating rounds of the steady comparison.")
@click.option("--all-reduce", "all_reduce", type=int, hidden=True)
def main(
    layers: int, hidden: int, steps_between: int, steady_steps: int, rounds: int, all_reduce: int | None
) -> None:
    if all_reduce is not None:
        bare_all_reduce(all_reduce)
        return
    shown = Console(highlight=False)
    model = [f"--layers={layers}", f"--hidden={hidden}", "--heads=4", "--global-batch=32"]
    with tempfile.TemporaryDirectory(prefix="etc-run-bench-") as name:
        stopped, losses = stops(model, Path(name), steps_between, shown)
        restarted = restarts(model, 5, shown)
        median = steady(model, Path(name), steady_steps, rounds, shown) if steady_steps else {}
    table = Table("change", "stopped under etc-run", "restarted by torchrun", "ratio")
    for change, values in stopped.items():
        stop_s, restart_s = statistics.median(values), statistics.median(restarted[change])
        table.add_row(change, f"{stop_s * 1e3:.0f} ms", f"{restart_s:.2f} s", f"{stop_s / restart_s:.4f}")
    shown.print(table)
    stop_s = statistics.median(value for values in stopped.values() for value in values)
    restart_s = statistics.median(value for values in restarted.values() for value in values)
    result: dict[str, Any] = {
        "stop_s": round(stop_s, 4),
        "restart_s": round(restart_s, 3),
        "stop_over_restart": round(stop_s / restart_s, 5),
        "changes": len(CHANGES),
        "worst_stop_s": round(max(value for values in stopped.values() for value in values), 4),
        "lost_s": round(statistics.median(loss.lost_s for loss in losses), 4),
        "lost_same_size_s": round(statistics.median(loss.lost_s for loss in losses if not loss.starts), 4),
    }
    slowdowns = [loss.slowdown for loss in losses if not loss.starts and loss.slowdown is not None]
    if slowdowns:
        result["prepare_slowdown_percent"] = round(100 * statistics.median(slowdowns), 1)
    if median:
        vote_s = 1.2 * median["all_reduce"]
        excess = (median["session"] - vote_s - median["plain"]) / median["plain"]
        result["steady_overhead_percent"] = round(100 * excess, 2)
        result |= {f"{kind}_ms": round(seconds * 1e3, 3) for kind, seconds in median.items()}
        shown.print(
            f"a step: {median['session'] * 1e3:.2f} ms in a session, {median['plain'] * 1e3:.2f} ms without; "
            f"the vote may cost {vote_s * 1e3:.2f} ms"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
