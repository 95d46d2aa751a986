"""What a run leaves behind: a line per step, and the samples each dp rank trained on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

from etc_agent.parallel.config import ParallelConfig


class StepLog:
    """Prints a line per step and appends it to a file of JSON lines, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._last = time.perf_counter()

    def step(self, step: int, loss: float, generation: int, config: ParallelConfig) -> None:
        """Report a finished step. Its duration counts from the end of the last one that this process saw."""
        now = time.perf_counter()
        duration_s, self._last = now - self._last, now
        place = f"{config}  generation {generation}"
        print(f"step {step:5d}  loss {loss:.6f}  {place}  {duration_s * 1e3:.1f} ms", flush=True)
        if self._path is not None:
            line = {
                "step": step, "loss": loss, "generation": generation, "config": str(config),
                "step_s": duration_s, "time": time.time(),
            }
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def tick(self) -> None:
        """Note a step's end where another rank reports it."""
        self._last = time.perf_counter()


def append_samples(folder: Path, process: int, step: int, generation: int, place: str, ids: Iterable[int]) -> None:
    """Append the sample ids of one step to this process's own file."""
    folder.mkdir(parents=True, exist_ok=True)
    line = {"step": step, "generation": generation, "place": place, "ids": list(ids)}
    with (folder / f"samples-{process}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
