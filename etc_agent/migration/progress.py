"""A progress bar for migrations that take long enough for someone to wonder."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

SHOW_AFTER_S = 2.0


class ProgressBar:
    """Pass it to `Migration.run`, on one worker only. Nothing is shown before `SHOW_AFTER_S` seconds."""

    def __init__(self, console: Console | None = None, show_after_s: float = SHOW_AFTER_S) -> None:
        columns = ("[bold]migration", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console or Console(stderr=True), transient=True)
        self._task = self._progress.add_task("migration", total=None)
        self._show_at = time.monotonic() + show_after_s
        self._shown = False

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        self._progress.update(self._task, completed=done_bytes, total=total_bytes)
        if not self._shown and time.monotonic() >= self._show_at:
            self._shown = True
            self._progress.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._progress.stop()
