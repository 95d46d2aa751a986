"""What `scale --dry-run` shows: the plan that the leader would carry out, and how long training would stand still."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Group, RenderableType
from rich.markup import escape

from etc_agent.reconfig.known.records import History
from etc_agent.reconfig.sizes.preview import PlanPreview, Preview
from launcher.ctl.show.screens import numbers
from launcher.ctl.show.tables import plain_table, size


@dataclass(frozen=True, slots=True)
class Prediction:
    """How long training would stand still, from what this job's `num_changes` last changes took."""

    stop_s: float
    num_changes: int


_MOST_CHANGES = 10


def predicted(history: Sequence[History], moved_bytes: int) -> Prediction | None:
    """A change costs what does not depend on bytes, and its bytes at the speed of the changes before. None where this
    job has not changed yet."""
    changes = [
        record for record in history
        if record.outcome == "committed" and record.previous and record.stop_ms is not None
    ][-_MOST_CHANGES:]
    if not changes:
        return None
    fixed_ms = median((record.stop_ms or 0.0) - record.phases_ms.get("migrate", 0.0) for record in changes)
    speeds = [
        record.moved_bytes / record.phases_ms["migrate"] for record in changes
        if record.moved_bytes and record.phases_ms.get("migrate")
    ]
    moving_ms = moved_bytes / median(speeds) if speeds else 0.0
    return Prediction(round((max(0.0, fixed_ms) + moving_ms) / 1000, 3), len(changes))


def dry_run_screen(preview: Preview, prediction: Prediction | None) -> RenderableType:
    """The plan, node by node."""
    head = escape(f"{preview.request}: would be {preview.result or 'nothing now'}: {preview.message}")
    if preview.is_restart:
        return f"{head}; all workers would be started afresh as {preview.config}: this script has no session"
    if preview.plan is None:
        return f"{head}; as {preview.config}, too large to be written out" if preview.config else head
    return Group(head, "", _nodes(preview.plan), _summary(preview.plan, prediction))


def _nodes(plan: PlanPreview) -> RenderableType:
    table = plain_table("node", "ranks before", "ranks after", "keeps>", "receives>", "from other nodes>", "peak>")
    for node in plan.nodes:
        table.add_row(
            escape(node.node), numbers(node.before) or "-", numbers(node.after) or "-", size(node.kept_bytes),
            size(node.received_bytes), size(node.from_other_nodes_bytes), size(node.peak_bytes),
        )
    return table


def _summary(plan: PlanPreview, prediction: Prediction | None) -> str:
    stop = "unknown, since this job has not changed its size yet"
    if prediction is not None:
        changes = f"{prediction.num_changes} change{'s' if prediction.num_changes > 1 else ''}"
        stop = f"{1000 * prediction.stop_s:.0f} ms, from {changes} of this job"
    return (
        f"{plan.previous_config} -> {plan.config}: {size(plan.kept_bytes)} stay in place, {size(plan.moved_bytes)} "
        f"move in {plan.transfers} transfers, {size(plan.between_nodes_bytes)} of them between nodes\n"
        f"peak state of a worker: {size(plan.peak_bytes)} where old and new fit together, else "
        f"{size(plan.release_peak_bytes)}; beside it buffers of up to {size(plan.buffer_bytes)}\n"
        f"training would stand still for: {stop}"
    )
