"""The stacks of Hugging Face's libraries: the elastic script trains as the one for torchrun does."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.stacks.catalogue import ACCELERATE, LLAMA, LLAMA_TIED, LORA_DDP, LORA_FSDP, TRAINER
from tests.stacks.harness import MOST_LINES, Stack, assert_same, changed_lines, run_changing, run_fixed

pytestmark = [pytest.mark.stacks, pytest.mark.timeout(900)]


@pytest.mark.parametrize("stack", [LLAMA, LORA_DDP, ACCELERATE, TRAINER], ids=lambda stack: stack.name)
def test_at_most_ten_lines_make_it_elastic(stack: Stack) -> None:
    lines = changed_lines(stack)
    assert 0 < len(lines) <= MOST_LINES, lines


@pytest.mark.parametrize(
    ("stack", "making"),
    [
        pytest.param(LLAMA, ("--make", "untied"), id="llama"),
        pytest.param(LLAMA_TIED, ("--make", "tied"), id="llama-tied"),
        pytest.param(LORA_DDP, ("--make",), id="lora-ddp"),
        pytest.param(LORA_FSDP, ("--make",), id="lora-fsdp"),
        pytest.param(ACCELERATE, (), id="accelerate"),
        pytest.param(TRAINER, (), id="trainer"),
    ],
)
def test_it_trains_as_at_a_fixed_size_while_its_size_changes(
    stack: Stack, making: tuple[str, ...], tmp_path: Path
) -> None:
    if making:
        model = tmp_path / "model"
        subprocess.run([sys.executable, stack.plain, model, *making], check=True)
        stack = replace(stack, options=(str(model), *stack.options))
    changing = run_changing(stack, tmp_path, timeout_s=300)
    assert_same(stack, changing, run_fixed(stack, tmp_path, max(changing.losses)))
