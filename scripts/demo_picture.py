"""The loss of a run as a picture, with the changes of size marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from etc_agent.reconfig.known.records import History


def draw_loss(
    steps: Sequence[dict[str, Any]], history: Sequence[History], step_ms: Mapping[int, float], path: Path
) -> None:
    """Write a picture of the loss over the steps to `path`.

    `steps`: lines of the training log, with step and loss. `history`: the generations, marked at their first step.
    `step_ms`: milliseconds of an ordinary step of each generation, taken off the time that training stood still.
    """
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([line["step"] for line in steps], [line["loss"] for line in steps], color="tab:blue", linewidth=1.2)
    top = axes.get_ylim()[1]
    for record in history:
        if record.outcome == "committed":
            axes.axvline(record.step, color="tab:red", linewidth=0.8, linestyle="--")
            label = f" {record.config}"
            if record.stop_ms is not None and record.generation in step_ms:
                stopped_ms = max(record.stop_ms - step_ms[record.generation], sum(record.phases_ms.values()))
                label += f"\n {stopped_ms:.0f} ms"
            axes.text(record.step, top, label, fontsize=8, va="top", color="tab:red")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("One job, five parallel configs: the loss goes on, and so do the workers that stay")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
