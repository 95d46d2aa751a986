"""torchelastic's file timer: with ``TORCHELASTIC_ENABLE_FILE_TIMER=1`` a script can set time limits for parts of itself
(`torch.distributed.elastic.timer`); a worker whose timer expires is killed."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from torch.distributed.elastic.timer import FileTimerServer

_FILE = "TORCHELASTIC_TIMER_FILE"


class _Watchdog(FileTimerServer):
    """torch's timer server, except that it does not kill its own process after the worker: a killed worker is a failure
    like any other, which may lead to a restart."""

    def _reap_worker(self, worker_pid: int, signal: int) -> bool:
        return worker_pid == os.getpid() or super()._reap_worker(worker_pid, signal)


def start_watchdog(run_id: str, folder: Path) -> FileTimerServer | None:
    """The timer server of this node, if the variable asks for it. Workers inherit the name of its pipe, which is in
    `folder` unless TORCHELASTIC_TIMER_FILE names it."""
    if os.environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") != "1":
        return None
    path = os.environ.setdefault(_FILE, str(folder / f"watchdog_timer_{uuid.uuid4()}"))
    server = _Watchdog(file_path=path, run_id=run_id, max_interval=0.1, daemon=True)
    server.start()
    return server
