"""The training job of scripts/chaos, which has checkpoints, with workers that die by SIGKILL while state is on its way:
the one of slot 2 in its first migration, that of slot 1 in its second.

    dying_job.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts" / "chaos"), str(ROOT / "tests" / "worker")]
import job  # noqa: E402
from tiny_job import die_midway  # noqa: E402

if __name__ == "__main__":
    slot = os.environ["LOCAL_RANK"]
    if slot in ("1", "2") and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        die_midway(0.5, migration=2 if slot == "1" else 1)
    job.HIDDEN, job.CHECKPOINT_EVERY = 1536, 5
    job.main(Path(sys.argv[1]), 12, 0.03)
