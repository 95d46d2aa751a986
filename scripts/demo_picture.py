"""The loss of a run as a picture, with the changes of size marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from etc_agent.reconfig.records import History


def draw_loss(steps: Sequence[dict[str, Any]], history: Sequence[History], path: Path) -> None:
    """Write a picture of the loss over the steps to `path`.

    `steps`: lines of the training log, with step and loss. `history`: the generations, of which the migrated ones are
    marked at their first step.
    """
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([line["step"] for line in steps], [line["loss"] for line in steps], color="tab:blue", linewidth=1.2)
    top = axes.get_ylim()[1]
    for record in history:
        if record.outcome == "committed":
            axes.axvline(record.step, color="tab:red", linewidth=0.8, linestyle="--")
            label = f" {record.config}" + (f"\n {record.stop_ms:.0f} ms" if record.stop_ms is not None else "")
            axes.text(record.step, top, label, fontsize=8, va="top", color="tab:red")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("One job, five sizes: the workers that stay keep running")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
