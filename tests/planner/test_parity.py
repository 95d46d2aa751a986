"""Parity against bytes: what each keeper has is summed by hand, and any failure domain that is lost comes back."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_keepers import cut_over, elements, jobs, losses

from etc_agent.planner.copies.keepers import (
    Block,
    Piece,
    Survival,
    domains_of,
    lost_bytes,
    peer_blocks,
    survival_with,
    with_rebuilt,
)
from etc_agent.planner.copies.parity import MOST_MEMBERS, cut_evenly, parity_blocks, parity_groups
from etc_agent.state.boxes import Box, whole
from etc_agent.state.layout import LogicalTensor, Shard

VALUES = np.random.default_rng(1).integers(0, 2**32, (3, 4, 6), dtype=np.uint32)
"""Of each tensor of `jobs`."""


def bytes_of(piece: Piece, length: int) -> np.ndarray:
    parts = [
        VALUES[int(part.tensor.name[1:])][part.box.within(whole(part.tensor.shape))].tobytes() for part in piece.parts
    ]
    return np.frombuffer(b"".join(parts).ljust(length, b"\0"), np.uint8)


def kept(block: Block) -> np.ndarray:
    """The bytes that the keeper has."""
    return np.bitwise_xor.reduce([bytes_of(piece, block.num_bytes) for piece in block.pieces])


@given(jobs())
@settings(max_examples=300, deadline=None)
def test_the_loss_of_any_failure_domain_takes_no_byte_with_it(job) -> None:
    layout, nodes = job
    blocks, domains = parity_blocks(layout, nodes), domains_of(nodes)
    own = elements(layout)
    wanted = own.sum(axis=0) > 0
    for block in blocks:
        members = [block.keeper, *(piece.owner for piece in block.pieces)]
        assert len({domains[worker] for worker in members}) == len(members), "all on different nodes"
        for piece in block.pieces:
            assert (elements((piece.parts,))[0] <= own[piece.owner]).all(), "an owner has what it sends"
    if len(set(domains)) == 1:
        assert blocks == ()
        return
    for gone in losses(domains, 1):
        survivors = with_rebuilt(layout, blocks, gone)
        have = np.delete(elements(survivors), sorted(gone), axis=0).sum(axis=0)
        assert not (wanted & (have == 0)).any()
        for block in blocks:
            piece = block.rebuilt(gone)
            if piece is not None:
                total = kept(block)
                for other in block.pieces:
                    if other is not piece:
                        assert other.owner not in gone
                        total = total ^ bytes_of(other, block.num_bytes)
                assert (total == bytes_of(piece, block.num_bytes)).all()


@given(jobs())
@settings(max_examples=200, deadline=None)
def test_what_a_job_survives_is_what_trying_every_loss_of_nodes_shows(job) -> None:
    layout, nodes = job
    blocks = parity_blocks(layout, nodes)
    found, wanted = survival_with(layout, blocks, nodes), elements(layout).sum(axis=0) > 0
    if not wanted.any():
        return

    def survives(number: int) -> bool:
        for gone in losses(nodes, number):
            have = np.delete(elements(with_rebuilt(layout, blocks, gone)), sorted(gone), axis=0).sum(axis=0)
            if (wanted & (have == 0)).any():
                return False
        return True

    assert all(map(survives, range(1, found.num_nodes + 1)))
    if found.num_nodes + 1 < len(set(nodes)):
        assert not survives(found.num_nodes + 1)
    workers = list(range(len(layout)))
    for gone in losses(workers, min(found.num_workers, 1)):
        have = np.delete(elements(with_rebuilt(layout, blocks, gone)), sorted(gone), axis=0).sum(axis=0)
        assert not (wanted & (have == 0)).any()


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 8])
def test_a_worker_keeps_one_part_in_n_minus_1_of_what_a_copy_takes(num_nodes: int) -> None:
    tensor = LogicalTensor("t0", (num_nodes, 5, 7, 24), "float32", 4)
    layout = tuple((Shard(tensor, Box((worker, 0, 0, 0), (1, 5, 7, 24))),) for worker in range(num_nodes))
    nodes = list(range(num_nodes))
    copied = peer_blocks(layout, nodes)[0].num_bytes
    blocks = parity_blocks(layout, nodes)
    assert sorted(block.keeper for block in blocks) == nodes
    assert all(abs(block.num_bytes - copied / (num_nodes - 1)) < 4 for block in blocks)
    assert survival_with(layout, blocks, nodes) == Survival(1, 1)


def test_two_losses_in_one_group_cannot_be_made_good_and_in_two_groups_they_can() -> None:
    layout, nodes = cut_over(6), [0, 0, 1, 1, 2, 2]
    blocks = parity_blocks(layout, nodes)
    groups = [set(group.members) for group in parity_groups(domains_of(nodes))]
    assert groups == [{0, 2, 4}, {1, 3, 5}]
    for gone in combinations(range(6), 2):
        is_in_one = any(set(gone) <= group for group in groups)
        assert bool(lost_bytes(layout, with_rebuilt(layout, blocks, gone), gone)) == is_in_one


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60))
def test_groups_are_as_even_as_possible_and_own_each_worker_once(nodes: list[int]) -> None:
    domains = domains_of(nodes)
    groups = parity_groups(domains)
    if len(set(domains)) == 1:
        assert groups == ()
        return
    assert sorted(owner for group in groups for owner in group.owners) == list(range(len(nodes)))
    sizes = {len(group.members) for group in groups}
    assert min(sizes) >= 2
    assert max(sizes) <= MOST_MEMBERS
    assert max(sizes) - min(sizes) <= 1
    for group in groups:
        assert len({domains[member] for member in group.members}) == len(group.members)


@given(
    st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=5), st.integers(1, 9),
    st.sampled_from([1, 2, 8]),
)
def test_pieces_are_equal_to_one_element_and_are_all_there_is(shapes, num_pieces, itemsize) -> None:
    parts = [Shard(LogicalTensor(f"t{n}", shape, "x", itemsize), whole(shape)) for n, shape in enumerate(shapes)]
    pieces = cut_evenly(parts, num_pieces)
    assert len(pieces) == num_pieces
    total = sum(part.num_bytes for part in parts)
    for piece in pieces:
        assert abs(sum(part.num_bytes for part in piece) - total / num_pieces) < 2 * itemsize
    for number, shape in enumerate(shapes):
        seen = np.zeros(shape, dtype=int)
        for piece in pieces:
            for part in piece:
                if part.tensor.name == f"t{number}":
                    seen[part.box.within(whole(shape))] += 1
        assert (seen == 1).all()
