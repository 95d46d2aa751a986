"""Box algebra beyond intersection: difference, cutting, and whether boxes cover a whole exactly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from etc_agent.state.boxes import Box


def box_overlap(a: Box, b: Box) -> bool:
    """Whether two boxes of one tensor share an element."""
    return a.intersect(b) is not None


def subtract_box(box: Box, part: Box) -> list[Box]:
    """What is left of `box` without `part`, which lies inside it: at most two boxes per dim, disjoint."""
    rest: list[Box] = []
    offset, shape = list(box.offset), list(box.shape)
    for dim, (start, extent) in enumerate(zip(part.offset, part.shape, strict=True)):
        before = start - offset[dim]
        after = offset[dim] + shape[dim] - start - extent
        if before:
            rest.append(Box(tuple(offset), (*shape[:dim], before, *shape[dim + 1 :])))
        if after:
            end = start + extent
            rest.append(Box((*offset[:dim], end, *offset[dim + 1 :]), (*shape[:dim], after, *shape[dim + 1 :])))
        offset[dim], shape[dim] = start, extent
    return rest


def subtract_all(box: Box, parts: Iterable[Box]) -> list[Box]:
    """What is left of `box` without any of `parts`, which may reach beyond it."""
    rest = [box] if box.num_elements else []
    for part in parts:
        kept: list[Box] = []
        for piece in rest:
            common = piece.intersect(part)
            kept.extend(subtract_box(piece, common) if common is not None else (piece,))
        rest = kept
    return rest


def split_box(box: Box, max_elements: int) -> list[Box]:
    """Cut `box` into near-equal pieces of at most `max_elements` (>= 1), along dim 0 while that is enough, then deeper.

    A piece cut along the first dim that is longer than one is contiguous in a row-major array of the box.
    """
    size = box.num_elements
    if size <= max_elements:
        return [box]
    dim = next(index for index, extent in enumerate(box.shape) if extent > 1)
    extent = box.shape[dim]
    num_pieces = min(extent, -(-size // max_elements))
    while (-(-extent // num_pieces)) * (size // extent) > max_elements and num_pieces < extent:
        num_pieces += 1
    pieces: list[Box] = []
    for index in range(num_pieces):
        start, end = extent * index // num_pieces, extent * (index + 1) // num_pieces
        piece = Box(
            (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :]),
            (*box.shape[:dim], end - start, *box.shape[dim + 1 :]),
        )
        pieces.extend(split_box(piece, max_elements))
    return pieces


def missing_box(whole: Box, parts: Sequence[Box]) -> Box | None:
    """A part of `whole` that none of `parts` covers, or None where they cover it all."""
    rest = subtract_all(whole, parts)
    return rest[0] if rest else None


def flat_range(box: Box, start: int, end: int) -> list[Box]:
    """Elements [start, end) of `box` in row-major order, as at most 2n - 1 boxes for n dims, in that order."""
    if start >= end:
        return []
    if not box.shape:
        return [box]
    if start == 0 and end == box.num_elements:
        return [box]
    row = box.num_elements // box.shape[0]
    first, last = start // row, (end - 1) // row

    def rows(begin: int, stop: int) -> Box:
        return Box((box.offset[0] + begin, *box.offset[1:]), (stop - begin, *box.shape[1:]))

    def inner(at: int, low: int, high: int) -> list[Box]:
        below = flat_range(Box(box.offset[1:], box.shape[1:]), low, high)
        return [Box((box.offset[0] + at, *part.offset), (1, *part.shape)) for part in below]

    if first == last and end - start < row:
        return inner(first, start - first * row, end - first * row)
    found: list[Box] = []
    if start > first * row:
        found += inner(first, start - first * row, row)
        first += 1
    tail = end - last * row
    stop = last + 1 if tail == row else last
    if stop > first:
        found.append(rows(first, stop))
    if tail < row:
        found += inner(last, 0, tail)
    return found
