"""The stacks that need PyTorch alone: the elastic script trains as the one for torchrun does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.stacks.catalogue import DDP, FSDP2, HSDP, LIGHT, MOE, NANOGPT
from tests.stacks.harness import MOST_LINES, Stack, assert_same, changed_lines, run_changing, run_fixed

SHORT = (replace(DDP, sizes=("3", "1")), replace(NANOGPT, sizes=("4",)), replace(FSDP2, sizes=("DP4",)))


def name(stack: Stack) -> str:
    return f"{stack.name} {' '.join((stack.start, *stack.sizes))}"


@pytest.mark.parametrize("stack", [DDP, NANOGPT, FSDP2, MOE], ids=name)
def test_at_most_ten_lines_make_it_elastic(stack: Stack) -> None:
    lines = changed_lines(stack)
    assert 0 < len(lines) <= MOST_LINES, lines


@pytest.mark.parametrize("stack", SHORT, ids=name)
def test_it_trains_as_at_a_fixed_size_while_its_size_changes(stack: Stack, tmp_path: Path) -> None:
    changing = run_changing(stack, tmp_path)
    assert_same(stack, changing, run_fixed(stack, tmp_path, max(changing.losses)))


@pytest.mark.stacks
@pytest.mark.parametrize("stack", LIGHT, ids=name)
def test_it_trains_so_through_every_change(stack: Stack, tmp_path: Path) -> None:
    changing = run_changing(stack, tmp_path)
    assert_same(stack, changing, run_fixed(stack, tmp_path, max(changing.losses)))


@pytest.mark.stacks
@pytest.mark.parametrize("stack", [NANOGPT, HSDP], ids=name)
def test_the_script_for_torchrun_learns_as_fast(stack: Stack, tmp_path: Path) -> None:
    """Where the data, or the division of the state, is another one."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    elastic = run_fixed(replace(stack, compared_with="itself"), ours, 100)
    plain = run_fixed(replace(stack, compared_with="torchrun", fixed=2), theirs, 100)
    last = [sum(run.losses[step] for step in range(80, 100)) / 20 for run in (elastic, plain)]
    assert last[0] == pytest.approx(last[1], rel=0.05)
    assert last[0] < 0.8 * elastic.losses[0]
