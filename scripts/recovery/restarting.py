"""The same loss under torchrun, which restarts all workers, from a PyTorch distributed checkpoint of every step."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from etc_agent.parallel.config import ParallelConfig
from recovery.job import TIMEOUT_S, RecoveryError

SCRIPT = Path(__file__).resolve().parents[1] / "train_gpt_dcp.py"


def restarts(config: str, model: list[str], rounds: int) -> list[float]:
    """Seconds from SIGKILL of a worker to the end of the next step, once for each round.

    Raises:
        RecoveryError: a step did not come.
    """
    shared_memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="etc-run-bench-", dir=shared_memory if shared_memory.is_dir() else None))
    num_ranks = ParallelConfig.parse(config).num_ranks
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks),
        "--max-restarts", "1000", str(SCRIPT), *model, "--steps=1000000", "--parallel", config, "--save-every=1",
        f"--save-dir={folder}", f"--step-log={folder / 'steps.jsonl'}",
    ]
    # With the store shared, most restarts fail on this PyTorch: it still has the last life's addresses.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        return [_lose(process, folder, number) for number in range(rounds)]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _lose(process: subprocess.Popen[bytes], folder: Path, number: int) -> float:
    """Kill a worker when the life after `number` restarts has saved a few steps."""
    _first_step(folder, number)
    steps = len(_lines(folder / "steps.jsonl"))
    _wait(lambda: len(_lines(folder / "steps.jsonl")) >= steps + 5, "five more steps", folder)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [pid for pid in children if SCRIPT.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
    began = time.time()
    os.kill(int(random.Random(number).choice(sorted(workers))), signal.SIGKILL)
    return float(_first_step(folder, number + 1)["time"]) - began


def _first_step(folder: Path, number: int) -> dict[str, Any]:
    """The end of the first step of the life after `number` restarts."""

    def found() -> dict[str, Any] | None:
        lines = [line for line in (folder / "output").read_text().splitlines() if line.startswith('{"event"')]
        events = [event for event in map(json.loads, lines) if event["event"] == "first_step"]
        return events[number] if len(events) > number else None

    return _wait(found, f"a step after {number} restarts", folder)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _wait(condition: Any, what: str, folder: Path) -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise RecoveryError(f"waited {TIMEOUT_S:.0f} s for {what}:\n{(folder / 'output').read_text()[-3000:]}")
        time.sleep(0.02)
    return value
