"""What scripts that were written for torchrun do first in a session either works or is named in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("torchrun_habits.py")

META = "it runs on the meta device, where tensors have no values, so it must not read them"
EXPECTED = {
    "own step": "the script called optimizer.step() in a step of the session; remove that call: step.commit()",
    "own step between two steps": "lr 1.0",
    "plateau": "lr 0.25",
    "item": f"build() raised RuntimeError: Tensor.item() cannot be called on meta tensors: {META}",
    "numpy": f"build() raised TypeError: can't convert meta device type tensor to numpy. "
    f"Use Tensor.cpu() to copy the tensor to host memory first.: {META}",
    "to": "lr 1.0",
    "ddp": f"build() raised RuntimeError: Tensor.item() cannot be called on meta tensors: {META}",
    "kept": 'model.weight has no value: with init="module" build() is called again, on the real device, and it',
    "init returns text": "TrainState.init returned '12'; it must return the step to begin with",
    "init loads": "lr 1.0",
}


def test_habits_from_torchrun_work_or_are_named_with_the_remedy() -> None:
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120)
    told = dict(line.split(": ", 1) for line in run.stdout.splitlines() if ": " in line)
    assert told.keys() == EXPECTED.keys(), run.stdout + run.stderr
    assert {name: told[name][: len(start)] for name, start in EXPECTED.items()} == EXPECTED
