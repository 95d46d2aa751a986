"""What a run leaves behind: a line per step, and the samples each dp rank trained on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from etc_agent.worker.context import ParallelContext


class StepLog:
    """Prints a line per step and appends it to a file of JSON lines, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._last = time.perf_counter()

    def step(self, step: int, loss: float | None, parallel: ParallelContext) -> None:
        """Note a finished step; the last stage's first rank reports it. Its duration counts from the last one's end."""
        now = time.perf_counter()
        duration_s, self._last = now - self._last, now
        if loss is None or not _reports(parallel):
            return
        place = f"{parallel.config}  generation {parallel.generation}"
        print(f"step {step:5d}  loss {loss:.6f}  {place}  {duration_s * 1e3:.1f} ms", flush=True)
        if self._path is not None:
            line = {
                "step": step, "loss": loss, "generation": parallel.generation, "config": str(parallel.config),
                "step_s": duration_s, "time": time.time(),
            }
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def start(self) -> None:
        """The next step's duration counts from now."""
        self._last = time.perf_counter()


class SampleLog:
    """Appends the sample ids of each step to this process's own file in a folder, if there is one."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / f"samples-{os.getpid()}.jsonl"
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def append(self, step: int, ids: Iterable[int], parallel: ParallelContext) -> None:
        if self._path is None:
            return
        place = parallel.coordinate
        line = {
            "step": step, "generation": parallel.generation, "config": str(parallel.config),
            "pp": place.pp, "dp": place.dp, "tp": place.tp, "ids": list(ids),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _reports(parallel: ParallelContext) -> bool:
    """Whether this is the one rank that reports losses: on the last stage, first of dp and tp."""
    place = parallel.coordinate
    return place.pp == parallel.config.pp - 1 and place.dp == 0 and place.tp == 0
