"""What a request would do: the leader's own decision and plan, without doing it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etc_agent.reconfig.known.records import Request
from etc_agent.reconfig.known.view import Describe, Policy
from etc_agent.reconfig.sizes.preview import Preview, preview
from etc_agent.simulator.cluster.at_rest import Cluster
from etc_agent.simulator.cluster.workers import layout_of


def two_nodes() -> Cluster:
    cluster = Cluster(Policy(1, 4, 4))
    cluster.join("a", num_slots=4)
    cluster.join("b", num_slots=4)
    cluster.run()
    cluster.ask("PP2TP1DP2")
    cluster.run()
    assert cluster.config == "PP2TP1DP2"
    return cluster


def previewed(cluster: Cluster, text: str, **changes: object) -> Preview:
    """The answer to the preview of `text`, after the cluster's workers have described what they were asked about."""
    for _ in range(50):
        answer = preview(replace(cluster.view(), **changes), Request(text, 77))  # type: ignore[arg-type]
        if isinstance(answer, Preview):
            return answer
        assert isinstance(answer, Describe)
        cluster.descriptions[answer.config] = layout_of(answer.config)
    raise AssertionError("no answer")


def test_a_preview_is_the_plan_that_the_request_carries_out() -> None:
    cluster = two_nodes()
    before = cluster.current
    answer = previewed(cluster, "PP1TP2DP2")
    assert cluster.current == before
    assert (answer.result, answer.revision, answer.config) == ("accepted", 77, "PP1TP2DP2")
    assert answer.plan is not None
    assert answer.plan.previous_config == "PP2TP1DP2"
    cluster.ask("PP1TP2DP2")
    cluster.run()
    for node in answer.plan.nodes:
        ranks = [rank for rank, slot in enumerate(cluster.committed.placement) if slot.node == node.node]
        assert list(node.after) == ranks
    needed = sum(shard.num_bytes for manifest in layout_of(cluster.committed.config) for shard in manifest)
    assert answer.plan.kept_bytes + answer.plan.moved_bytes == needed
    assert sum(node.received_bytes for node in answer.plan.nodes) == answer.plan.moved_bytes
    assert answer.plan.peak_bytes >= answer.plan.release_peak_bytes > 0


@pytest.mark.parametrize(
    ("text", "result", "said"),
    [
        ("400", "refused", "nnodes admits at most"),
        ("nonsense", "refused", "is not a size"),
        ("PP2TP1DP2", "done", "already runs as"),
        ("16", "pending", "waiting for nodes"),
    ],
)
def test_what_would_not_change_the_job_is_answered_as_the_request_would_be(text: str, result: str, said: str) -> None:
    answer = previewed(two_nodes(), text)
    assert (answer.result, answer.plan) == (result, None)
    assert said in answer.message


def test_a_pause_and_nodes_that_have_just_come_do_not_hide_the_plan() -> None:
    assert previewed(two_nodes(), "8", paused=True, quiet_s=0.0).plan is not None


def test_while_a_change_is_prepared_there_is_no_preview() -> None:
    cluster = two_nodes()
    cluster.is_slow = True
    cluster.ask("8")
    cluster.run()
    assert "ask again when it is in force" in previewed(cluster, "4").message


def test_a_script_without_a_session_would_be_restarted() -> None:
    cluster = Cluster(Policy(1, 1, 4), hooked=False)
    cluster.join("a", num_slots=4)
    cluster.run()
    answer = previewed(cluster, "2", phase_s=1e9)
    assert (answer.is_restart, answer.plan) == (True, None)


def test_a_preview_is_the_same_after_its_way_through_etcd() -> None:
    answer = previewed(two_nodes(), "8")
    assert Preview.from_json(answer.to_json()) == answer

