"""Boxes: hyper-rectangles of logical tensors, and the algebra on them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A hyper-rectangle of a logical tensor: `offset` and `shape`, one entry per dim, in elements.

    A 0-dim tensor has the box ``Box((), ())`` of one element. A box with a zero in its shape is empty.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None where there is none. Both boxes are of the same tensor."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
        return Box(offset, shape) if all(extent > 0 for extent in shape) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The slices that cut this box out of an array that holds `outer`."""
        return tuple(
            slice(a - b, a - b + n) for a, b, n in zip(self.offset, outer.offset, self.shape, strict=True)
        )


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor of `shape`."""
    return Box((0,) * len(shape), shape)
