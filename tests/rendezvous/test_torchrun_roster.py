from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etc_agent.rendezvous.etcd.values import KeyValue
from etc_agent.rendezvous.torchrun.roster import (
    Ending,
    Node,
    Roster,
    View,
    in_rank_order,
    next_roster,
    num_nodes_waiting,
)


def node(name: str, arrival: int = 0, *, node_rank: int | None = None, waits_after: int | None = 0) -> Node:
    return Node(name, arrival, f"host-{name}", 1000 + arrival, node_rank, waits_after)


def view(*nodes: Node, members: str = "", generation: int = 0, ending: Ending | None = None) -> View:
    return View({node.name: node for node in nodes}, Roster(generation, tuple(members), "", 0, ending), 1)


def test_the_first_generation_is_in_order_of_arrival_and_hosted_by_the_first() -> None:
    roster = next_roster(view(node("b", 2), node("a", 3), node("c", 1)), max_nodes=2)
    assert roster == Roster(1, ("c", "b"), "host-c", 1001)


def test_survivors_keep_their_order_and_newcomers_follow() -> None:
    survivors = node("c", 3, waits_after=5), node("b", 9, waits_after=5)
    seen = view(*survivors, node("x", 1), node("y", 2), members="abc", generation=5)
    assert next_roster(seen, max_nodes=4).members == ("b", "c", "x", "y")
    assert next_roster(seen, max_nodes=3).members == ("b", "c", "x")


def test_a_node_that_is_busy_is_in_no_roster() -> None:
    seen = view(node("a", 1, waits_after=None), node("b", 2, waits_after=3), members="b", generation=3)
    assert next_roster(seen, max_nodes=4).members == ("b",)
    assert seen.newcomers == []


def test_asked_for_ranks_are_given_and_the_others_fill_up() -> None:
    nodes = [node("a", 1), node("b", 2, node_rank=0), node("c", 3, node_rank=7), node("d", 4, node_rank=0)]
    assert [node.name for node in in_rank_order(nodes)] == ["b", "a", "d", "c"]


@given(st.lists(st.none() | st.integers(0, 6), max_size=6))
def test_ranking_is_a_permutation_that_honours_distinct_wishes(wishes: list[int | None]) -> None:
    nodes = [node(f"n{index}", index, node_rank=wish) for index, wish in enumerate(wishes)]
    ordered = in_rank_order(nodes)
    assert sorted(ordered, key=lambda node: node.arrival) == nodes
    for rank, wish in enumerate(wishes):
        if wish is not None and wish < len(nodes) and wishes.count(wish) == 1:
            assert ordered[wish] is nodes[rank]


def waiting(seen: View, me: str = "a", generation: int = 5, max_nodes: int = 4, *, settled: bool = False) -> int:
    return num_nodes_waiting(seen, me, generation, max_nodes, are_newcomers_settled=settled)


A, B = node("a", 1, waits_after=4), node("b", 2, waits_after=4)


def test_nothing_happens_while_nothing_changes() -> None:
    assert waiting(view(A, B, members="ab", generation=5)) == 0


def test_a_departure_is_a_reason_to_meet_again() -> None:
    assert waiting(view(A, members="ab", generation=5)) == 1


def test_our_own_absence_is_not_a_departure() -> None:
    assert waiting(view(B, members="ab", generation=5)) == 0


def test_a_member_that_has_given_up_is_a_reason() -> None:
    assert waiting(view(A, node("b", 2, waits_after=5), members="ab", generation=5)) == 1


def test_newcomers_are_let_in_when_settled_or_when_they_fill_the_job() -> None:
    seen = view(A, B, node("x", 3), members="ab", generation=5)
    assert waiting(seen) == 0
    assert waiting(seen, settled=True) == 1
    assert waiting(seen, max_nodes=3) == 1


def test_waiting_nodes_beyond_the_maximum_are_no_reason() -> None:
    assert waiting(view(A, B, node("x", 3), members="ab", generation=5), max_nodes=2, settled=True) == 0


def test_a_waiting_node_replaces_a_departed_member_at_once() -> None:
    assert waiting(view(A, node("x", 3), members="ab", generation=5), max_nodes=2) == 2


def test_a_generation_that_began_without_us_is_a_reason() -> None:
    assert waiting(view(B, members="b", generation=6)) == 1


def test_a_run_that_has_finished_elsewhere_lets_us_finish_and_a_failed_one_does_not() -> None:
    assert waiting(view(A, members="ab", generation=5, ending=Ending.FINISHED)) == 0
    assert waiting(view(A, members="ab", generation=5, ending=Ending.FAILED)) == 1
    assert waiting(view(A, B, members="ab", generation=5, ending=Ending.FAILED)) == 0


def test_records_survive_the_way_through_etcd() -> None:
    roster = Roster(3, ("a", "b"), "host", 1234, Ending.FAILED)
    assert Roster.from_key_value(KeyValue("k", roster.to_json().encode(), 1, 2, 1, 0)) == roster
    record = node("a", 7, node_rank=2, waits_after=None)
    assert Node.from_key_value("a", KeyValue("k", record.to_json().encode(), 7, 9, 1, 0)) == record
