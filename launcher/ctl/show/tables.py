"""The tables that etc-ctl and the demo print."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from etc_agent.reconfig.known.records import History

_COLUMNS = ("gen", "config", "outcome", "why", "kept", "started", "stopped", "moved", "stopped training", "at step")
_NUMBERS = ("gen", "kept", "started", "stopped", "moved", "at step")


def console() -> Console:
    """Standard output; wide where it is a pipe or a file, since nobody's window limits it there."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def size(num_bytes: float) -> str:
    """Bytes for people: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def history_table(records: Iterable[History], step_ms: Mapping[int, float] | None = None) -> Table:
    """One row per generation: what changed, what it moved and how long training stood still.

    `step_ms`: see `stopped_training`.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in _COLUMNS:
        is_text = name in ("why", "stopped training")
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=not is_text)
    for record in records:
        outcome = record.outcome if record.outcome == "committed" else f"[red]{record.outcome}"
        migrated = record.previous != 0
        table.add_row(
            str(record.generation), record.config, outcome, record.why or record.reason, str(record.kept),
            str(record.started), str(record.stopped), size(record.moved_bytes) if migrated else "",
            stopped_training(record, step_ms or {}), str(record.step) if migrated else "",
        )
    return table


def stopped_training(record: History, step_ms: Mapping[int, float]) -> str:
    """``212 ms (migrate 120, swap 40)``: whole, then by phase.

    The whole runs to the end of the first step of the new generation. Where `step_ms` (generation -> milliseconds of
    an ordinary step) knows that generation, such a step is taken off, but no more than leaves the phases; else the text
    says that it is part of it.
    """
    phases = ", ".join(f"{name} {milliseconds:.0f}" for name, milliseconds in record.phases_ms.items())
    if record.stop_ms is None:
        return phases and f"({phases})"
    ordinary = step_ms.get(record.generation)
    if ordinary is None:
        whole = f"{record.stop_ms:.0f} ms with the first step"
    else:
        whole = f"{max(record.stop_ms - ordinary, sum(record.phases_ms.values())):.0f} ms"
    return f"{whole} ({phases})" if phases else whole


def plain_table(*columns: str) -> Table:
    """An empty table with these columns; numbers stand at the right where a column's name ends in ``>``."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left")
    return table


def grid() -> Table:
    """An empty table of names and values."""
    return Table(show_header=False, box=None, pad_edge=False)
