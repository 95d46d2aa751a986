"""What a generation can lose without losing state."""

from __future__ import annotations

import pytest

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.loss.survival import Survival, by_grid


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
