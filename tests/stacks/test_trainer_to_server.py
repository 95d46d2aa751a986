"""The server has the same weights whether the model is gathered for it or migrated."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def losses_of(script: Path) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "5", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return re.findall(r"step \d+ loss \S+", ended.stdout)


@pytest.mark.stacks
def test_a_server_gets_the_weights_that_a_gathering_trainer_gives_it() -> None:
    migrated = losses_of(EXAMPLES / "trainer_to_server.py")
    assert migrated == losses_of(EXAMPLES / "torchrun" / "trainer_to_server.py")
    assert len(set(migrated)) == 6
