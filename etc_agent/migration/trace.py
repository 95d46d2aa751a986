"""Phase spans as a Chrome trace: open it in Perfetto (ui.perfetto.dev) or chrome://tracing.

Format: "Trace Event Format", complete events (``X``) in microseconds and counters (``C``); one process per worker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etc_agent.migration.errors import MigrationError
from etc_agent.migration.report import MigrationReport


def trace_events(reports: Mapping[int, MigrationReport]) -> list[dict[str, Any]]:
    """The events of several workers' reports, by worker number."""
    events: list[dict[str, Any]] = []
    for worker, report in sorted(reports.items()):
        events.append({"ph": "M", "pid": worker, "name": "process_name", "args": {"name": f"worker {worker}"}})
        events += [
            {"ph": "X", "pid": worker, "tid": 0, "name": s.name, "ts": s.start_s * 1e6, "dur": s.seconds * 1e6}
            for s in report.spans
        ]
        events += [
            {"ph": "C", "pid": worker, "name": "held bytes", "ts": p.at_s * 1e6, "args": {"bytes": p.held_bytes}}
            for p in report.timeline
        ]
    return events


def write_trace(path: Path, reports: Mapping[int, MigrationReport]) -> None:
    """Write the trace of `reports`; a file is there whole or not at all.

    Raises:
        MigrationError: it cannot be written. A caller in a training job logs this and goes on.
    """
    unfinished = path.with_name(path.name + ".part")
    try:
        unfinished.write_text(json.dumps({"traceEvents": trace_events(reports), "displayTimeUnit": "ms"}))
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise MigrationError(
            f"the trace cannot be written to {path}: {error.strerror}; the migration is not affected"
        ) from error
