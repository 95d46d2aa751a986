"""What administrators write below control/: cordons, a pause, the order to stop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.records import Outcome, Result
from etc_agent.reconfig.known.view import Policy, Write
from etc_agent.reconfig.leader import decide
from etc_agent.reconfig.sizes.controls import Cordon, Order, parse_cordon, parse_order, parse_pause
from etc_agent.simulator.cluster.at_rest import Cluster


@pytest.mark.parametrize(
    ("value", "order"),
    [
        ("", Order()),
        ("ECC errors", Order("ECC errors")),
        ('{"why": "ECC errors", "by": "ada", "since": 7}', Order("ECC errors", "ada", 7.0)),
        ('{"why": 3}', Order("3")),
        ("{broken", Order("{broken")),
        ('{"since": "yesterday"}', Order('{"since": "yesterday"}')),
    ],
)
def test_an_order_is_json_or_plain_text(value: str, order: Order) -> None:
    assert parse_order(value) == order


def test_a_cordon_covers_a_node_or_one_slot_of_it() -> None:
    node, slot = parse_cordon("a", ""), parse_cordon("a/3", "broken fan")
    assert (node, slot) == (Cordon("a"), Cordon("a", 3, Order("broken fan")))
    assert node.covers(Slot("a", 0))
    assert node.covers(Slot("a", 3))
    assert not node.covers(Slot("b", 3))
    assert slot.covers(Slot("a", 3))
    assert not slot.covers(Slot("a", 0))
    for name in ("", "a/", "a/x", "a/3/4", "/3"):
        with pytest.raises(ValueError, match="NODE/INDEX"):
            parse_cordon(name, "")


@pytest.mark.parametrize("value", ["true", " TRUE ", "1", "yes", "on", '{"why": "a demo"}', "{}"])
def test_a_pause_is_a_word_for_yes_or_an_order(value: str) -> None:
    assert parse_pause(value) is not None


@pytest.mark.parametrize("value", ["", "false", "False", "0", "no", "off"])
def test_a_word_for_no_is_no_pause(value: str) -> None:
    assert parse_pause(value) is None


@pytest.mark.parametrize("value", ["ture", "2", "{not json", "x" * 5000])
def test_nonsense_does_not_pause_a_job(value: str) -> None:
    with pytest.raises(ValueError, match="neither true nor false") as error:
        parse_pause(value)
    assert len(str(error.value)) < 250


def test_the_order_to_stop_ends_the_job_and_answers_the_request_that_is_open() -> None:
    cluster = Cluster(Policy(1, 4, 4))
    cluster.join("a", num_slots=4)
    cluster.run()
    cluster.ask("16")
    cluster.run()
    assert cluster.replies[-1].result is Result.PENDING
    for view in (cluster.view(), replace(cluster.view(), paused=True)):
        decision = decide(replace(view, stop=Order("the budget is spent", "ada")))
        assert isinstance(decision, Write)
        assert (decision.current.outcome, decision.current.exit_code) == (Outcome.STOPPED, 143)
        assert decision.current.why == "an administrator stopped it: the budget is spent (by ada)"
        assert decision.reply is not None
        assert decision.reply.result is Result.REFUSED
