"""Random lives of a job on the simulated cluster; see `etc_agent.simulator.cluster.lives`."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from test_cluster_fencing import FENCING, OnceWorld, once, policy

from etc_agent.control.causes import ErrorKind
from etc_agent.control.redundancy import Redundancy, Scheme
from etc_agent.parallel.config import ParallelConfig
from etc_agent.reconfig.known.view import Decision, View
from etc_agent.reconfig.leader import decide
from etc_agent.simulator.cluster.lives import PEACE_S, BrokenPromise, Life, check
from etc_agent.simulator.cluster.workers import Model
from etc_agent.simulator.cluster.world import TrainedAtOnce, World

CONFIGS = ("PP1TP1DP2", "PP1TP1DP3", "PP1TP1DP4", "PP2TP1DP1", "PP2TP1DP2", "PP3TP1DP1", "PP1TP2DP1", "PP1TP2DP2")
NUM_NODES = ((1, 1), (1, 1), (1, 2), (1, 3), (2, 3))
"""Least and most nodes of a job. Where it may have only one, the others are spares."""


def world(random: Random, kind: type[World] = World, **rules: object) -> World:
    impossible = {config: "the model has no such config" for config in CONFIGS if random.random() < 0.2}
    in_session = random.random() < 0.7
    model = Model(in_session, impossible if in_session else {}, stop_s=random.choice((0.0, 0.5, 3.0)))
    redundancy = Redundancy(random.choice(list(Scheme)))
    rules_of_job = replace(policy(*random.choice(NUM_NODES)), redundancy=redundancy)
    return kind(rules_of_job, FENCING, model, **rules)  # type: ignore[arg-type]


@pytest.mark.parametrize("seeds", [range(first, first + 12) for first in range(0, 36, 12)], ids=str)
def test_no_two_generations_train_at_once_and_after_the_troubles_everybody_has_what_is_due(seeds: range) -> None:
    for seed in seeds:
        random = Random(seed)
        life = Life(world(random), random, random.choice((2, 3, 3, 4)))
        life.trouble(25)
        life.peace()


def barring_for_ever(view: View) -> Decision:
    """What was given up is out of the question for good, as it once was."""
    barred = tuple(replace(each, kind=ErrorKind.MODEL, instance="") for each in view.current.given_up)
    return decide(replace(view, current=replace(view.current, given_up=barred)))


TWO_SIZES = replace(policy(), allowed=(ParallelConfig(dp=2), ParallelConfig(dp=4)))


def refused_once(world: World) -> World:
    """It trains on node a; node b came while the workers had no memory for more, which has passed."""
    world.join("a")
    world.run(20.0)
    world.model.refusing = "no memory"
    world.join("b")
    world.run_until(lambda: bool(world.etcd.records.current.given_up), "a change that is given up")
    world.model.refusing = ""
    world.run(PEACE_S)
    return world


def test_a_change_that_was_refused_once_is_made_later() -> None:
    world = refused_once(World(TWO_SIZES, FENCING))
    check(world)
    assert set(world.committed.nodes) == {"a", "b"}


def test_a_config_that_is_barred_for_ever_is_noticed() -> None:
    world = refused_once(World(TWO_SIZES, FENCING, decide=barring_for_ever))
    with pytest.raises(BrokenPromise, match="is wanted and possible"):
        check(world)


def test_random_lives_find_what_was_wrong_with_the_rule_of_once() -> None:
    def live() -> None:
        for seed in range(100):
            random = Random(seed)
            Life(world(random, OnceWorld, fencing_rule=once), random, random.choice((2, 3, 3, 4))).trouble(25)

    with pytest.raises(TrainedAtOnce):
        live()
