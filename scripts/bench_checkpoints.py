"""What checkpoints cost: the same job under etc-run with and without them, in turn; and how long training stands still.

The demo GPT on four workers of this machine (PP2TP1DP2), a checkpoint every `--every` steps to `--folder`. From the
step log: the mean step of each run without its first quarter. From the checkpoints' markers: for how long rank 0 stood
still to copy its state, and how long the writing took beside training. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from etc_agent.errors import EtcError
from etc_agent.worker.checkpoints.folder import Marker, check, newest_first

ROOT = Path(__file__).resolve().parent.parent
CONFIG, NUM_RANKS = "PP2TP1DP2", 4
TIMEOUT_S = 600.0


class Markers:
    """Collects the markers of the checkpoints that appear in a folder, before they are pruned."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.found: dict[int, Marker] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> list[Marker]:
        """All that were seen, by step."""
        self._is_over.set()
        self._thread.join()
        self._look()
        return [self.found[step] for step in sorted(self.found)]

    def _watch(self) -> None:
        while not self._is_over.wait(0.2):
            self._look()

    def _look(self) -> None:
        for path in newest_first(self._folder):
            if int(path.name.removeprefix("step-")) in self.found:
                continue
            try:
                marker = check(path)
            except (EtcError, OSError):
                continue
            self.found[marker.step] = marker


def run(model: list[str], steps: int, log: Path, checkpoint: dict[str, str]) -> float:
    """Train; seconds of the mean step after the first quarter of them."""
    command = [
        sys.executable, "-m", "launcher.run", "--standalone", "--nproc-per-node", str(NUM_RANKS), "--parallel", CONFIG,
        str(ROOT / "scripts" / "train_gpt.py"), *model, f"--steps={steps}", f"--step-log={log}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ETC_SPARES": "cold", **checkpoint}
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    if result.returncode or "was not written" in result.stderr:
        raise click.ClickException(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr[-2000:]}")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    times = {line["step"]: line["time"] for line in lines}
    first, last = steps // 4, steps - 1
    return (times[last] - times[first]) / (last - first)


@click.command(help=__doc__)
@click.option("--layers", default=4, show_default=True)
@click.option("--hidden", default=128, show_default=True)
@click.option("--steps", default=120, show_default=True)
@click.option("--every", default=20, show_default=True, help="Steps between two checkpoints.")
@click.option("--rounds", default=3, show_default=True, help="Pairs of runs.")
@click.option("--folder", type=Path, help="Where to write; by default a temporary folder.")
def main(layers: int, hidden: int, steps: int, every: int, rounds: int, folder: Path | None) -> None:
    shown = Console(highlight=False)
    model = [f"--layers={layers}", f"--hidden={hidden}", "--heads=4", "--global-batch=32"]
    steps_s: dict[str, list[float]] = {"without": [], "with": []}
    markers: list[Marker] = []
    with tempfile.TemporaryDirectory(prefix="etc-run-bench-", dir=folder) as name:
        for number in range(rounds):
            for kind in ("without", "with") if number % 2 else ("with", "without"):
                saved = Path(name) / f"saved-{number}"
                variables = {"ETC_CHECKPOINT": str(saved), "ETC_CHECKPOINT_STEPS": str(every)}
                watching = Markers(saved)
                mean_s = run(model, steps, Path(name) / f"{kind}-{number}.jsonl", variables if kind == "with" else {})
                markers += watching.close()
                steps_s[kind].append(mean_s)
                shown.print(f"  round {number + 1}, {kind} checkpoints: {mean_s * 1e3:.1f} ms a step")
                shutil.rmtree(saved, ignore_errors=True)
    if not markers:
        raise click.ClickException("no checkpoint was written; choose a smaller --every")
    with_s, without_s = statistics.median(steps_s["with"]), statistics.median(steps_s["without"])
    stops = [marker.stopped_s for marker in markers]
    result: dict[str, Any] = {
        "step_with_ms": round(with_s * 1e3, 2),
        "step_without_ms": round(without_s * 1e3, 2),
        "overhead_percent": round(100 * (with_s / without_s - 1), 2),
        "every_steps": every,
        "checkpoints": len(markers),
        "checkpoint_mb": round(sum(markers[-1].files.values()) / 1e6, 2),
        "stopped_ms": round(statistics.median(stops) * 1e3, 2),
        "worst_stopped_ms": round(max(stops) * 1e3, 2),
        "written_s": round(statistics.median(marker.written_s for marker in markers), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
