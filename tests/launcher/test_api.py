"""`launcher.elastic_launch`: an elastic job from Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from etc_agent.agent.settings import Timeouts
from etc_agent.errors import EtcError
from etc_agent.parallel.config import ParallelConfig
from etc_agent.rendezvous.server import EtcdServer
from launcher.timeouts import with_rdzv_conf

PROGRAM = """
import os, sys, time
from pathlib import Path
from torch.distributed.launcher.api import LaunchConfig
from launcher import JobFailed, elastic_launch

def work(folder, code):
    rank = os.environ["RANK"]
    Path(folder, f"{rank}.new").write_text(os.environ["WORLD_SIZE"])
    Path(folder, f"{rank}.new").rename(Path(folder, rank))
    while not all(Path(folder, each).exists() for each in "01"):  # the first to fail ends both
        time.sleep(0.01)
    sys.exit(code)

if __name__ == "__main__":
    backend, endpoint, folder, code = sys.argv[1:]
    config = LaunchConfig(1, 1, 2, run_id=f"api-{code}", rdzv_backend=backend, rdzv_endpoint=endpoint, max_restarts=0,
                          local_addr="127.0.0.1")
    try:
        print("returned", elastic_launch(config, work)(folder, int(code)))
    except JobFailed as failed:
        print("failed", failed.exit_code)
"""


@pytest.mark.parametrize(("code", "said"), [(0, "returned {}"), (5, "failed 5")])
def test_a_function_runs_on_every_worker_of_an_elastic_job(tmp_path: Path, code: int, said: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with EtcdServer() as etcd:
        command = [sys.executable, str(program), "etcd-v3", etcd.endpoint, str(tmp_path), str(code)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert said in ended.stdout, ended.stderr
    assert (tmp_path / "0").read_text() == "2"


def test_other_backends_go_to_torch(tmp_path: Path) -> None:
    from torch.distributed.launcher.api import LaunchConfig
    from torch.distributed.launcher.api import elastic_launch as torch_elastic_launch

    import launcher

    config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    assert isinstance(launcher.elastic_launch(config, "true"), torch_elastic_launch)


def test_a_config_that_can_never_be_is_refused_in_one_line() -> None:
    from torch.distributed.launcher.api import LaunchConfig

    import launcher

    config = LaunchConfig(1, 1, 2, run_id="x", rdzv_backend="etcd-v3", rdzv_endpoint="a:1")
    with pytest.raises(EtcError, match="PP4TP1DP1 needs 4 workers, the job admits 2"):
        launcher.elastic_launch(config, "true", parallel=ParallelConfig(pp=4))


@pytest.mark.parametrize(
    ("given", "join_s"),
    [
        ({"join_s": 40}, 40), ({"join_timeout": 50}, 50), ({"timeout": 60}, 60), ({}, 900),
        ({"join_s": 40, "join_timeout": 50}, 40), ({"join_timeout": 50, "join_s": 40}, 40),
    ],
)
def test_a_timeout_that_was_given_is_not_overridden_by_the_one_that_torch_adds(
    given: dict[str, int], join_s: float
) -> None:
    from torch.distributed.launcher.api import LaunchConfig

    config = LaunchConfig(1, 1, 2, run_id="x", rdzv_backend="etcd-v3", rdzv_endpoint="a:1", rdzv_configs=dict(given))
    assert with_rdzv_conf(Timeouts(), config.rdzv_configs).join_s == join_s
