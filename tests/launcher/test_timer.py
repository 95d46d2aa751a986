"""TORCHELASTIC_ENABLE_FILE_TIMER: a script bounds a part of itself in time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, time
import torch.distributed.elastic.timer as timer
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=0.5):
        time.sleep(60)
"""


def test_an_expired_timer_ends_its_worker_and_the_job_restarts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, "-m", "launcher.run", "--standalone", "--max-restarts=1", str(script)],
        env={**os.environ, "TORCHELASTIC_ENABLE_FILE_TIMER": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "was killed by SIGKILL" in ended.stderr
