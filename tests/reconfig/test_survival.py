"""What a generation can lose without losing state."""

from __future__ import annotations

import pytest

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.survival import Survival, by_grid, by_layout
from etc_agent.state.boxes import Box
from etc_agent.state.layout import LogicalTensor, Shard

WEIGHT, MOMENT = LogicalTensor("w", (4,), "float32", 4), LogicalTensor("m", (4,), "float32", 4)


def generation(config: str, *slots: str) -> Generation:
    return Generation(1, ParallelConfig.parse(config), tuple(map(Slot.parse, slots)), "s:1", 0)


@pytest.mark.parametrize(
    ("config", "slots", "survival"),
    [
        ("DP2", ("a/0", "b/0"), Survival(True, True, "grid")),
        ("DP2", ("a/0", "a/1"), Survival(True, False, "grid")),
        ("TP2", ("a/0", "b/0"), Survival(False, False, "grid")),
        ("TP2DP2", ("a/0", "a/1", "b/0", "b/1"), Survival(True, True, "grid")),
        ("PP2DP2", ("a/0", "b/0", "a/1", "a/2"), Survival(True, False, "grid")),
        ("DP2EP2", ("a/0", "b/0"), Survival(False, False, "grid")),
        ("CP2", ("a/0", "b/0"), Survival(True, True, "grid")),
    ],
)
def test_replicas_on_other_workers_and_nodes_are_what_a_job_survives_by(
    config: str, slots: tuple[str, ...], survival: Survival
) -> None:
    assert by_grid(generation(config, *slots)) == survival


def test_a_layout_tells_of_state_that_is_split_over_dp() -> None:
    whole, halves = Shard(WEIGHT, Box((0,), (4,))), [Shard(MOMENT, Box((at,), (2,))) for at in (0, 2)]
    two = generation("DP2", "a/0", "b/0")
    assert by_layout(((whole,), (whole,)), two) == Survival(True, True, "layout")
    assert by_layout(((whole, halves[0]), (whole, halves[1])), two) == Survival(False, False, "layout")
    four = generation("DP4", "a/0", "b/0", "a/1", "b/1")
    assert by_layout(tuple((whole, halves[rank // 2]) for rank in range(4)), four) == Survival(True, True, "layout")
