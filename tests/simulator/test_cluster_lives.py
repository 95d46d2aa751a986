"""Random lives of a job on the simulated cluster; see `etc_agent.simulator.cluster.lives`."""

from __future__ import annotations

from random import Random

import pytest
from test_cluster_fencing import FENCING, OnceWorld, once, policy

from etc_agent.simulator.cluster.lives import Life
from etc_agent.simulator.cluster.workers import Model
from etc_agent.simulator.cluster.world import TrainedAtOnce, World

NUM_NODES = ((1, 1), (1, 1), (1, 2), (1, 3), (2, 3))
"""Least and most nodes of a job. Where it may have only one, the others are spares."""


def world(random: Random, kind: type[World] = World, **rules: object) -> World:
    model = Model(in_session=random.random() < 0.7, stop_s=random.choice((0.0, 0.5, 3.0)))
    if model.in_session:
        odd = random.choice(((), (), ("PP1TP1DP3", "PP1TP3DP1"), ("PP1TP1DP6", "PP1TP2DP2", "PP1TP1DP2")))
        model.impossible = {config: f"{config}: the model cannot have it" for config in odd}
    return kind(policy(*random.choice(NUM_NODES)), FENCING, model, **rules)  # type: ignore[arg-type]


@pytest.mark.parametrize("seeds", [range(first, first + 12) for first in range(0, 36, 12)], ids=str)
def test_no_two_generations_train_at_once_and_after_the_troubles_everybody_has_what_is_due(seeds: range) -> None:
    for seed in seeds:
        random = Random(seed)
        life = Life(world(random), random, random.choice((2, 3, 3, 4)))
        life.trouble(25)
        life.peace()


def test_random_lives_find_what_was_wrong_with_the_rule_of_once() -> None:
    def live() -> None:
        for seed in range(100):
            random = Random(seed)
            Life(world(random, OnceWorld, fencing_rule=once), random, random.choice((2, 3, 3, 4))).trouble(25)

    with pytest.raises(TrainedAtOnce):
        live()
