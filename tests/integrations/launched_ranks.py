"""Runs scripts of several ranks on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(num_ranks: int, script: Path, *arguments: str, timeout_s: float = 240.0) -> str:
    """The output of `script` on `num_ranks` workers under plain torchrun; fails where a worker does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [*command, str(script), *arguments], env=_environment(), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=timeout_s, check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def launch(num_ranks: int, script: Path, *arguments: str, timeout_s: float = 240.0) -> str:
    """The same with torchrun's environment but without torchrun, whose start takes as long as that of a worker."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with tempfile.TemporaryFile(mode="w+") as output, contextlib.ExitStack() as started:
        workers = [
            started.enter_context(
                subprocess.Popen(
                    [sys.executable, str(script), *arguments], stdout=output, stderr=subprocess.STDOUT,
                    env=_environment() | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            )
            for rank in range(num_ranks)
        ]
        for worker in workers:
            started.callback(worker.kill)
        codes = [worker.wait(timeout_s) for worker in workers]
        output.seek(0)
        text = output.read()
    assert not any(codes), text
    return text


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "scripts")}
