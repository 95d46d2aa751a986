"""Box algebra against sets of single elements."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from etc_agent.state.algebra import flat_range, missing_box, split_box, subtract_all, subtract_box
from etc_agent.state.boxes import Box, whole
from etc_agent.state.encoding import decode_layout, encode_layout
from etc_agent.state.layout import LogicalTensor, Shard

sizes = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))))


@st.composite
def boxes_in(draw, shape):
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Box(offset, tuple(draw(st.integers(1, n - a)) for n, a in zip(shape, offset, strict=True)))


@given(sizes, st.data())
@settings(deadline=None)
def test_a_difference_is_what_is_left_and_disjoint(shape, data):
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    common = a.intersect(b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)
    rest = subtract_box(a, common) if common else [a]
    assert set().union(*map(elements, rest), set()) == elements(a) - elements(b)
    assert sum(box.num_elements for box in rest) == len(elements(a) - elements(b))
    several = [data.draw(boxes_in(shape)) for _ in range(3)]
    left = set().union(*map(elements, subtract_all(a, several)), set())
    assert left == elements(a) - set().union(*map(elements, several))
    missing = missing_box(a, several)
    assert (missing is None) == (not left)
    assert missing is None or elements(missing) <= left


@given(sizes, st.integers(1, 20), st.data())
@settings(deadline=None)
def test_pieces_are_small_enough_and_make_up_the_box(shape, limit, data):
    box = data.draw(boxes_in(shape))
    pieces = split_box(box, limit)
    assert all(0 < piece.num_elements <= limit for piece in pieces)
    assert sum(piece.num_elements for piece in pieces) == box.num_elements
    assert set().union(*map(elements, pieces)) == elements(box)


@given(sizes, st.data())
@settings(max_examples=200, deadline=None)
def test_a_flat_range_is_a_short_list_of_boxes_in_order(shape, data):
    full = whole(shape)
    start = data.draw(st.integers(0, full.num_elements))
    end = data.draw(st.integers(start, full.num_elements))
    boxes = flat_range(full, start, end)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    array = np.arange(full.num_elements).reshape(shape)
    flat = [int(value) for box in boxes for value in array[box.within(full)].ravel()]
    assert flat == list(range(start, end))


def test_layouts_survive_encoding():
    tensor = LogicalTensor("w", (4, 2), "float32", 4)
    layout = ((Shard(tensor, Box((0, 0), (3, 2))),), (), (Shard(LogicalTensor("s", (), "int64", 8), Box((), ())),))
    assert decode_layout(encode_layout(layout)) == layout
