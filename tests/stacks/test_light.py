"""The stacks that need PyTorch alone: the elastic script trains as the one for torchrun does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stacks.catalogue import DDP
from tests.stacks.harness import MOST_LINES, Stack, assert_same, changed_lines, run_changing, run_fixed


@pytest.mark.parametrize("stack", [DDP], ids=lambda stack: stack.name)
def test_at_most_ten_lines_make_it_elastic(stack: Stack) -> None:
    lines = changed_lines(stack)
    assert 0 < len(lines) <= MOST_LINES, lines


@pytest.mark.parametrize("stack", [DDP], ids=lambda stack: stack.name)
def test_it_trains_as_at_a_fixed_size_while_its_size_changes(stack: Stack, tmp_path: Path) -> None:
    changing = run_changing(stack, tmp_path)
    assert_same(stack, changing, run_fixed(stack, tmp_path, max(changing.losses)))
