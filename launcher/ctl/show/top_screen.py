"""What `top` shows to people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from launcher.ctl.show.screens import note_hidden, numbers, per_s, shown_nodes, state_of, step_of
from launcher.ctl.show.tables import grid, plain_table
from launcher.ctl.show.times import ago, length

_BAR_WIDTH = 40


def top_screen(look: Mapping[str, Any], now: float) -> RenderableType:
    """One look at a job."""
    head = grid()
    head.add_row(f"[bold]{escape(look['run_id'])}", f"{state_of(look)}, {look['config'] or 'no config yet'}")
    head.add_row("now", escape(look["explanation"]))
    if look["step"] is not None:
        rate = look["rate_steps_per_s"]
        left = f", {length((look['num_steps'] - look['step']) / rate)} left" if look["num_steps"] and rate else ""
        told = f" ({ago(look['time'], now)})" if look["time"] else ""
        head.add_row("step", f"{step_of(look)}, {per_s(rate)}{left}{told}")
    if look["num_steps"] and look["step"] is not None:
        head.add_row("", ProgressBar(look["num_steps"], look["step"], width=_BAR_WIDTH))
    parts: list[RenderableType] = [head]
    if (change := look["changing_to"]) is not None:
        parts.append(_change(change))
    return Group(*parts, _nodes(look))


def _change(change: Mapping[str, Any]) -> Table:
    """A bar: how many nodes are ready for the change, until it is armed."""
    table = grid()
    table.add_row(
        f"generation {change['generation']}, {change['config']}: {change['phase']}",
        ProgressBar(change["nodes"], change["nodes_ready"], width=_BAR_WIDTH),
        f"{change['nodes_ready']} of {change['nodes']} nodes",
    )
    return table


def _nodes(look: Mapping[str, Any]) -> Table:
    table = plain_table("node", "state", "step>", "ranks", "idle", "warm", "follows etcd for")
    furthest = max((node["step"] for node in look["nodes"] if node["step"] is not None), default=None)
    for node in shown_nodes(look["nodes"]):
        step = "" if node["step"] is None else str(node["step"])
        behind = furthest is not None and node["step"] is not None and node["step"] < furthest - 1
        followed = length(node["follows_etcd_s"]) if node["follows_etcd_s"] else ""
        table.add_row(
            escape(node["name"]), node["state"], f"[yellow]{step}" if behind else step, numbers(node["ranks"]),
            numbers(node["idle_slots"]), numbers(node["warm_spares"]),
            followed if node["answers"] else "[yellow]does not answer here",
        )
    note_hidden(table, look["nodes"])
    return table
