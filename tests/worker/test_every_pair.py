"""Changes between the configs that fit on four workers, each judged bit for bit by an independent oracle.

`make test` takes each config twice; `make test-long` takes every ordered pair.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
from mini_agent import MiniAgent

sys.path.insert(0, str(Path(__file__).parents[1]))
from oracle import assert_same_bits, gathered

from etc_agent.parallel.config import ParallelConfig

CONFIGS = [
    ParallelConfig(pp, tp, dp)
    for pp in range(1, 5) for tp in range(1, 5) for dp in range(1, 5)
    if pp * tp * dp <= 4
]


def closed_walk(count: int) -> list[int]:
    """A walk over the nodes 0 .. count-1 that takes every ordered pair of distinct nodes once (Hierholzer)."""
    left = {node: [other for other in range(count) if other != node] for node in range(count)}
    stack, walk = [0], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


def test_the_walk_takes_every_ordered_pair() -> None:
    walk = closed_walk(len(CONFIGS))
    pairs = list(pairwise(walk))
    assert len(CONFIGS) == 13
    assert len(pairs) == len(set(pairs)) == 13 * 12


def short_walk(count: int) -> list[int]:
    """A walk that enters and leaves each of the nodes 0 .. count-1 twice; `count` is no multiple of 5."""
    return [*range(count), *(node * 5 % count for node in range(count + 1))]


def test_the_short_walk_takes_every_config_twice_and_no_pair_twice() -> None:
    pairs = list(pairwise(short_walk(len(CONFIGS))))
    assert len(set(pairs)) == len(pairs)
    for ends in zip(*pairs, strict=True):
        assert all(ends.count(node) >= 2 for node in range(len(CONFIGS)))


@pytest.mark.long
def test_changes_into_and_out_of_every_config_on_four_workers_keep_every_bit(tmp_path: Path) -> None:
    check_walk([CONFIGS[index] for index in short_walk(len(CONFIGS))], tmp_path)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_ordered_pair_of_configs_on_four_workers_keeps_every_bit(tmp_path: Path) -> None:
    check_walk([CONFIGS[index] for index in closed_walk(len(CONFIGS))], tmp_path)


def check_walk(walk: list[ParallelConfig], tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.05) as agent:
        agent.start(str(walk[0]))
        for previous, current in pairwise(walk):
            agent.change(str(current))
            assert agent.generation is not None
            number = agent.generation.id
            old = gathered(agent.dump_dir, number, "old", previous.num_ranks)
            new = gathered(agent.dump_dir, number, "new", current.num_ranks)
            assert any(name.startswith("rng.") for name in old)
            assert any(name.endswith("exp_avg_sq") for name in old)
            assert_same_bits(old, new)
            for path in agent.dump_dir.iterdir():
                path.unlink()
