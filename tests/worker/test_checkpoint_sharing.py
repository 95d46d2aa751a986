"""Which rank writes which box of a checkpoint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etc_agent.errors import EtcError
from etc_agent.state.boxes import Box, whole
from etc_agent.state.check import check_layout
from etc_agent.state.layout import LogicalTensor, Shard
from etc_agent.worker.checkpoints.sharing import shared


def tensor(name: str, *shape: int) -> LogicalTensor:
    return LogicalTensor(name, shape, "float32", 4)


def rows(of: LogicalTensor, first: int, num: int) -> Shard:
    return Shard(of, Box((first, *(0,) * (len(of.shape) - 1)), (num, *of.shape[1:])))


def test_replicas_are_written_once_and_by_all_ranks_in_turn() -> None:
    tensors = [tensor(name, 10) for name in "abcd"]
    offer = tuple(Shard(each, whole(each.shape)) for each in tensors)
    written = shared([offer, offer])
    assert [len(part) for part in written] == [2, 2]
    assert {shard.tensor.name for part in written for shard in part} == set("abcd")


def test_boxes_of_different_sizes_that_overlap_are_cut() -> None:
    table = tensor("table", 8, 3)
    written = shared([(Shard(table, whole((8, 3))),), (rows(table, 0, 4),), (rows(table, 4, 4),)])
    check_layout(tuple(tuple(part) for part in written), [table])
    assert sum(shard.box.num_elements for part in written for shard in part) == 24


def test_empty_and_scalar_tensors_are_written_once() -> None:
    nothing, scalar = tensor("nothing", 0, 3), tensor("scalar")
    offer = (Shard(nothing, whole((0, 3))), Shard(scalar, whole(())))
    assert sorted(shard.tensor.name for part in shared([offer, offer]) for shard in part) == ["nothing", "scalar"]


def test_a_part_that_no_rank_has_is_named() -> None:
    table = tensor("table", 8)
    with pytest.raises(EtcError, match=r"table: no rank has the box at \(4,\) of shape \(4,\)"):
        shared([(rows(table, 0, 4),), ()])


def test_ranks_that_disagree_on_a_tensor_are_told_its_name() -> None:
    with pytest.raises(EtcError, match=r"table is float32 \(8,\) on one rank and float32 \(9,\) on another"):
        shared([(Shard(tensor("table", 8), whole((8,))),), (Shard(tensor("table", 9), whole((9,))),)])


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 8)), max_size=3), min_size=1, max_size=5),
)
def test_every_element_is_written_exactly_once_whatever_is_offered(boxes: list[list[tuple[int, int]]]) -> None:
    table = tensor("table", 8, 2)
    offers = [tuple(rows(table, first, min(num, 8 - first)) for first, num in offer) for offer in boxes]
    offers.append((Shard(table, whole((8, 2))),))
    written = shared([tuple(dict.fromkeys(offer)) for offer in offers])
    assert sum(shard.box.num_elements for part in written for shard in part) == 16
    check_layout(tuple(tuple(part) for part in written), [table])
