"""Runs scripts of several ranks on this machine."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from pathlib import Path

from torch.distributed import TCPStore

from tests.forkserver import context
from tests.launchers import Forked

ROOT = Path(__file__).parents[2]


def torchrun(num_ranks: int, script: Path, *arguments: str, timeout_s: float = 240.0) -> str:
    """The output of `script` on `num_ranks` workers under plain torchrun; fails where a worker does."""
    command = ["--standalone", f"--nproc-per-node={num_ranks}", str(script), *arguments]
    with tempfile.NamedTemporaryFile(mode="r") as output:
        path = Path(output.name)
        started = Forked("torchrun", command, os.environ | _environment(), ROOT, path, path)
        try:
            code = started.wait(timeout_s)
        finally:
            started.kill()
        assert code == 0, output.read()
        return output.read()


def launch(num_ranks: int, script: Path, *arguments: str, timeout_s: float = 240.0) -> str:
    """The same with torchrun's environment but without torchrun, in processes that are forked with torch loaded."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = _environment() | {
        "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with tempfile.NamedTemporaryFile(mode="r") as output:
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
        workers = [
            context.Process(target=_work, args=(script, arguments, common | place, output.name)) for place in places
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout_s)
        codes = [worker.exitcode for worker in workers]
        for worker in workers:
            worker.kill()
        text = output.read()
    assert codes == [0] * num_ranks, text
    return text


def _work(script: Path, arguments: tuple[str, ...], environment: dict[str, str], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    sys.path.insert(0, environment["PYTHONPATH"])
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def _environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "scripts")}
