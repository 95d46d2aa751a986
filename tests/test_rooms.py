"""The rooms of docs/architecture.md: imports point one way, and the control plane needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_imports_between_rooms_point_one_way() -> None:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def _modules(*rooms: str) -> list[str]:
    found = []
    for room in rooms:
        for path in sorted((ROOT / "etc_agent" / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


@pytest.mark.parametrize(
    ("rooms", "others"),
    [
        (["parallel", "state", "planner", "reconfig", "simulator"], ["torch", "grpc", "socket"]),
        (["rendezvous", "control"], ["torch"]),
    ],
)
def test_every_module_of_a_light_room_loads_without(rooms: list[str], others: list[str]) -> None:
    modules = [module for module in _modules(*rooms) if module != "etc_agent.rendezvous.torchrun.handler"]
    # numpy and scipy load the socket module themselves; what counts is what our own modules add to them.
    program = (
        "import sys, importlib, numpy, scipy.optimize, scipy.sparse.csgraph\n"
        "before = set(sys.modules)\n"
        f"[importlib.import_module(name) for name in {modules!r}]\n"
        f"print([name for name in {others!r} if name in set(sys.modules) - before])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout == "[]\n"
