"""etc-run as a user installs it: a wheel in an environment of its own, run from another folder."""

from __future__ import annotations

import configparser
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.private.server import EtcdServer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = r"""
import os, sys, torch, torch.distributed as dist, etc_agent
assert "etc_agent.worker.process.group_numbers" in sys.modules
for number in range(2):
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
os.write(1, f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} runs {etc_agent.__file__}\n".encode())
"""


class Installed:
    """A virtual environment with the wheel in it, which finds all other packages where this test's own Python does."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        self._run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        self.site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))
        # What is named in a .pth file is searched, but nothing that an editable install does in it is run.
        others = [path for path in sys.path if path.endswith("-packages")]
        (self.site / "others.pth").write_text("\n".join(others) + "\n")
        self._run([
            sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet", "--no-deps",
            "--no-index", "--disable-pip-version-check", str(wheel),
        ])

    def __call__(self, program: str, *arguments: str) -> str:
        """Run a program of this environment; what it has printed."""
        return self._run([str(self.folder / "bin" / program), *arguments], self.folder)

    def _run(self, command: Sequence[str], cwd: Path | None = None) -> str:
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        ended = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("etc_agent", "launcher"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", *command, "-w", str(folder), str(source)], check=True, timeout=240)
    (wheel,) = folder.glob("*.whl")
    return Installed(folder / "environment", wheel)


def test_a_job_runs_from_another_folder(installed: Installed) -> None:
    script = installed.folder / "script.py"
    script.write_text(SCRIPT)
    output = installed("etc-run", "--standalone", "--nproc-per-node=2", str(script))
    for rank in range(2):
        assert f"rank {rank} of 2 runs {installed.site}/etc_agent/__init__.py" in output


def test_the_job_report_finds_its_page(installed: Installed) -> None:
    with EtcdServer() as server, EtcdClient([server.endpoint]) as client:
        client.put("/etc-run/job/job", "{}")
        installed("etc-ctl", "report", "-o", str(installed.folder / "r.html"), "--etcd-endpoints", server.endpoint)
    assert "job report" in (installed.folder / "r.html").read_text()


def test_the_planner_knows_its_models(installed: Installed) -> None:
    command = ["plan", "--model", "llama3-8b", "--from", "PP2TP2", "--to", "PP4TP2", "--nodes", "2x4", "--json"]
    assert json.loads(installed("etc-ctl", *command))["to"] == "PP4TP2DP1"


def test_one_version_is_told_everywhere(installed: Installed) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    version = setup["metadata"]["version"]
    assert installed("etc-run", "--version") == f"etc-run {version}\n"
    assert installed("etc-ctl", "--version") == f"etc-ctl {version}\n"
    assert installed("python", "-c", "import etc_agent; print(etc_agent.__version__)") == f"{version}\n"


def test_importing_torch_runs_nothing_of_ours(installed: Installed) -> None:
    """Not in the environment where etc-run is installed, and not where its folders are gone but not its metadata."""
    show = "import sys, torch; print([name for name in sys.modules if name.startswith(('etc_', 'launcher'))])"
    assert installed("python", "-c", show) == "[]\n"
    moved = installed.site / "etc_agent"
    moved.rename(installed.site / "away")
    try:
        assert installed("python", "-c", show) == "[]\n"
    finally:
        (installed.site / "away").rename(moved)


def test_plain_torchrun_loads_nothing_of_ours_but_the_name_of_the_backend(installed: Installed) -> None:
    show = "import sys, torch.distributed.run; print([n for n in sys.modules if n.startswith(('etc_', 'grpc'))])"
    assert installed("python", "-c", show) == "['etc_agent', 'etc_agent.rendezvous', 'etc_agent.rendezvous.handler']\n"
