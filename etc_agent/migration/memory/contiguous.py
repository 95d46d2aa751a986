"""Which boxes are one run of bytes in the shard around them."""

from __future__ import annotations

from etc_agent.state.boxes import Box


def is_contiguous_in(box: Box, outer: Box) -> bool:
    """Whether the elements of `box` follow each other in a row-major array that holds `outer`."""
    cut = [dim for dim, (inner, whole) in enumerate(zip(box.shape, outer.shape, strict=True)) if inner != whole]
    return not cut or all(size == 1 for size in box.shape[: cut[-1]])
