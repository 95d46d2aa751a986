"""The line of `etc-ctl status` on what the job can lose."""

from __future__ import annotations

import pytest

from etc_agent.control.redundancy import Redundancy, Scheme
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.loss.outlook import Outlook
from etc_agent.simulator.random_cases import layered
from etc_agent.state.boxes import Box
from etc_agent.state.layout import LogicalTensor, Shard

PEER = Redundancy(Scheme.PEER)
PARITY = Redundancy(Scheme.PARITY)


@pytest.mark.parametrize(
    ("config", "nodes", "redundancy", "copied", "said"),
    [
        ("PP2DP2", "aabb", Redundancy(), None, "any one worker"),
        ("PP2DP2", "abba", Redundancy(), None, "any one node"),
        ("DP4", "abcd", Redundancy(), None, "any 3 nodes"),
        ("PP2TP2", "aabb", Redundancy(), None, "nothing: PP2TP2DP1, no redundancy"),
        ("PP1", "a", PEER, None, "nothing: there is one worker"),
        ("PP2TP2", "aabb", PEER, None, "nothing until the first copies are complete, then any one node"),
        ("PP2TP2", "aabb", PEER, 120, "any one node (back to step 120, the last copies)"),
        ("PP2TP2", "aaaa", PEER, 120, "any one worker (back to step 120, the last copies)"),
        ("DP4", "abcd", PEER, None, "any 3 nodes"),
        ("PP4", "abcd", PARITY, None, "nothing until the first copies are complete, then any one node"),
        ("PP2TP2", "aabb", PARITY, 120, "any one node (back to step 120, the last copies)"),
        ("PP4", "aaaa", PARITY, 120, "any one worker (back to step 120, the last copies)"),
        ("DP4", "abcd", PARITY, None, "any 3 nodes"),
    ],
)
def test_what_a_job_survives(config: str, nodes: str, redundancy: Redundancy, copied: int | None, said: str) -> None:
    parsed = ParallelConfig.parse(config)
    placement = tuple(Slot(node, nodes[:rank].count(node)) for rank, node in enumerate(nodes))
    generation = Generation(1, parsed, placement, "host:1", 0)
    # The grid is tp fastest, then dp, then pp: as in `layered`.
    layout = layered(4, parsed.pp, parsed.tp, parsed.dp)
    assert Outlook.of(layout, generation, redundancy).in_words(copied) == said


def test_state_that_is_split_over_dp_is_on_one_worker_each() -> None:
    weight, moment = (LogicalTensor(name, (4,), "float32", 4) for name in "wm")
    whole, halves = Shard(weight, Box((0,), (4,))), [Shard(moment, Box((at,), (2,))) for at in (0, 2)]
    generation = Generation(1, ParallelConfig(dp=2), (Slot("a", 0), Slot("b", 0)), "host:1", 0)
    for layout, survives in (((whole,), (whole,)), True), (((whole, halves[0]), (whole, halves[1])), False):
        assert Outlook.of(layout, generation, Redundancy()).to_json(None)["node"] is survives
        assert Outlook.of(layout, generation, PEER).to_json(3)["node"] is True
