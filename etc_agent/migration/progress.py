"""A progress bar for migrations that take longer than `SHOW_AFTER_S`."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

SHOW_AFTER_S = 2.0


class ProgressBar:
    """Pass it to `Migration.run`, on one worker only. Before `SHOW_AFTER_S` seconds nothing is shown, and almost
    nothing is done."""

    def __init__(self, console: Console | None = None, show_after_s: float = SHOW_AFTER_S) -> None:
        self._console = console
        self._show_at = time.monotonic() + show_after_s
        self._progress: Progress | None = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if self._progress is None:
            if time.monotonic() < self._show_at:
                return
            self._progress = self._started()
        self._progress.update(self._progress.task_ids[0], completed=done_bytes, total=total_bytes)

    def _started(self) -> Progress:
        columns = ("[bold]migration", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        progress = Progress(*columns, console=self._console or Console(stderr=True), transient=True)
        progress.add_task("migration", total=None)
        progress.start()
        return progress

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
