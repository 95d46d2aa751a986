"""Runs a script of several ranks under plain torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(num_ranks: int, script: Path, *arguments: str, timeout_s: float = 240.0) -> str:
    """The output of `script` on `num_ranks` workers of this machine; fails where a worker does, with its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run(
        [*command, str(script), *arguments],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
