"""Megatron-Core: the elastic script trains as the plain one does, through pp, tp and dp, with both optimizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stacks.catalogue import MEGATRON, MEGATRON_BF16, MEGATRON_DISTRIBUTED
from tests.stacks.harness import MOST_LINES, Stack, assert_same, changed_lines, run_changing, run_fixed

pytestmark = pytest.mark.stacks


def test_at_most_ten_lines_make_it_elastic() -> None:
    lines = changed_lines(MEGATRON)
    assert 0 < len(lines) <= MOST_LINES, lines


@pytest.mark.parametrize(
    "stack", [MEGATRON, MEGATRON_DISTRIBUTED, MEGATRON_BF16], ids=["plain", "distributed", "bf16"]
)
def test_it_trains_as_at_a_fixed_size_while_its_size_changes(stack: Stack, tmp_path: Path) -> None:
    changing = run_changing(stack, tmp_path)
    assert_same(stack, changing, run_fixed(stack, tmp_path, max(changing.losses)))
