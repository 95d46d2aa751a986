"""Who keeps whose state, against counting single elements of arrays and trying every loss."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_agent.planner.copies.keepers import Survival, lost_bytes, peer_blocks, survival, with_copies
from etc_agent.state.boxes import Box, whole
from etc_agent.state.layout import Layout, LogicalTensor, Shard

SHAPE = (4, 6)


@st.composite
def boxes(draw):
    offset = [draw(st.integers(0, size - 1)) for size in SHAPE]
    return Box(tuple(offset), tuple(draw(st.integers(1, size - at)) for size, at in zip(SHAPE, offset, strict=True)))


@st.composite
def jobs(draw):
    """Workers that hold up to one box of each tensor, and their nodes."""
    tensors = [LogicalTensor(f"t{number}", SHAPE, "float32", 4) for number in range(draw(st.integers(1, 3)))]
    num_workers = draw(st.integers(1, 6))
    held = draw(st.lists(
        st.lists(st.none() | st.just(whole(SHAPE)) | boxes(), min_size=len(tensors), max_size=len(tensors)),
        min_size=num_workers, max_size=num_workers,
    ))
    layout = tuple(
        tuple(Shard(tensor, box) for tensor, box in zip(tensors, row, strict=True) if box is not None) for row in held
    )
    nodes = draw(st.lists(st.integers(0, 3), min_size=num_workers, max_size=num_workers))
    return layout, nodes


def elements(layout: Layout) -> np.ndarray:
    """How often each worker has each element of each tensor: (workers, tensors, *SHAPE)."""
    count = np.zeros((len(layout), 3, *SHAPE), dtype=int)
    for worker, manifest in enumerate(layout):
        for shard in manifest:
            count[worker, int(shard.tensor.name[1:])][shard.box.within(whole(SHAPE))] += 1
    return count


def losses(units: list[int], number: int):
    """Every set of workers that the loss of `number` units (worker -> its unit) takes away."""
    for gone in combinations(sorted(set(units)), number):
        yield {worker for worker, unit in enumerate(units) if unit in gone}


def survives(have: np.ndarray, wanted: np.ndarray, units: list[int], number: int) -> bool:
    """Whether any `number` units of workers can be lost."""
    for gone in losses(units, number):
        left = np.delete(have, sorted(gone), axis=0).sum(axis=0)
        if (wanted & (left == 0)).any():
            return False
    return True


@given(jobs())
@settings(max_examples=300, deadline=None)
def test_with_peer_copies_no_single_domain_takes_state_with_it_and_nothing_is_kept_twice(job):
    layout, nodes = job
    copies = peer_blocks(layout, nodes)
    domains = nodes if len(set(nodes)) > 1 else list(range(len(layout)))
    own, wanted = elements(layout), elements(layout).sum(axis=0) > 0
    have = own + elements(with_copies(tuple(() for _ in layout), copies))
    assert len({copy.pieces[0].owner for copy in copies}) == len(copies)
    for copy in copies:
        (piece,) = copy.pieces
        assert domains[copy.keeper] != domains[piece.owner]
        assert (elements((piece.parts,))[0] <= own[piece.owner]).all(), "an owner has what it sends"
    assert (have <= 1).all(), "nobody keeps what it holds, or the same twice"
    if len(set(domains)) > 1:
        for gone in losses(domains, 1):
            kept = np.delete(have, sorted(gone), axis=0).sum(axis=0)
            assert not (wanted & (kept == 0)).any()
    exposed = sum(
        bool(wanted_here) and len({domains[worker] for worker in range(len(layout)) if own[(worker, *at)]}) == 1
        for at, wanted_here in np.ndenumerate(wanted)
    )
    kept_elements = sum(copy.num_bytes for copy in copies) // 4
    assert kept_elements == (exposed if len(set(domains)) > 1 else 0), "what has a replica elsewhere is not copied"


@given(jobs(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_survival_and_lost_bytes_are_those_of_trying_every_loss(job, with_peers):
    layout, nodes = job
    held = with_copies(layout, peer_blocks(layout, nodes)) if with_peers else layout
    own, have = elements(layout), elements(held)
    wanted = own.sum(axis=0) > 0
    for gone in losses(list(range(len(layout))), min(2, len(layout))):
        left = np.delete(have, sorted(gone), axis=0).sum(axis=0)
        assert lost_bytes(layout, held, gone) == int((wanted & (left == 0)).sum()) * 4
    found = survival(held, nodes)
    if not wanted.any():
        assert found == Survival(0, 0)
        return
    for units, number in ((nodes, found.num_nodes), (list(range(len(layout))), found.num_workers)):
        assert survives(have, wanted, units, number)
        assert number + 1 > len(set(units)) or not survives(have, wanted, units, number + 1)


def cut_over(num_workers: int) -> Layout:
    """Each worker has a row of its own of one tensor."""
    tensor = LogicalTensor("t0", (num_workers, 6), "float32", 4)
    return tuple((Shard(tensor, Box((worker, 0), (1, 6))),) for worker in range(num_workers))


@pytest.mark.parametrize(
    ("nodes", "most_kept"),
    [([0, 0, 1, 1], 1), ([0, 1, 2, 3], 1), ([0, 0, 0, 0], 1), ([0, 0, 0, 1], 3), ([0, 0, 1, 1, 2, 2], 1)],
)
def test_workers_that_hold_alike_keep_alike(nodes, most_kept):
    kept = [0] * len(nodes)
    for copy in peer_blocks(cut_over(len(nodes)), nodes):
        kept[copy.keeper] += copy.num_bytes // 24
    assert sum(kept) == len(nodes)
    assert max(kept) == most_kept


def test_the_copies_of_a_node_go_to_the_next_node():
    copies = peer_blocks(cut_over(6), [0, 0, 1, 1, 2, 2])
    assert {(copy.pieces[0].owner, copy.keeper) for copy in copies} == {(0, 2), (1, 3), (2, 4), (3, 5), (4, 0), (5, 1)}


def test_replicas_inside_one_node_are_copied_once_and_by_turns():
    tensors = [LogicalTensor(f"t{number}", (6,), "float32", 4) for number in range(4)]
    first = tuple(Shard(tensor, whole((6,))) for tensor in tensors)
    other = (Shard(LogicalTensor("other", (6,), "float32", 4), whole((6,))),)
    copies = peer_blocks((first, first, other), [0, 0, 1])
    assert {copy.pieces[0].owner: len(copy.pieces[0].parts) for copy in copies} == {0: 2, 1: 2, 2: 1}


@pytest.mark.parametrize(
    ("found", "text"),
    [(Survival(1, 1), "any one node"), (Survival(3, 3), "any 3 nodes"), (Survival(0, 1), "any one worker"),
     (Survival(0, 0), "nothing")],
)
def test_survival_in_words(found, text):
    assert str(found) == text
