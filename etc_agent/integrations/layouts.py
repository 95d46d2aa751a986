"""Pieces: what a script says of a local tensor that holds boxes of logical tensors and is no DTensor, such as a fused
projection that is cut by hand, or a flat range of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch

from etc_agent.errors import EtcError
from etc_agent.state.algebra import flat_range as boxes_of_range
from etc_agent.state.boxes import Box, whole


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a logical tensor, and where it lies in the local tensor.

    `shape`: of the whole logical tensor. `offset`, `extent`: of the box in it, one number per dim, in elements.
    `start`: the box's first corner in the local tensor. If the local tensor has one dim and the box another number of
    them, `start` has one number: the box lies there in row-major order (a flat range). `name`: of the logical tensor;
    None for the local tensor's own name.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    start: tuple[int, ...]
    name: str | None = None

    @property
    def box(self) -> Box:
        return Box(self.offset, self.extent)

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """The box inside the plain tensor `local`, sharing its memory."""
        if len(self.start) == len(self.extent):
            ends = zip(self.start, self.extent, strict=True)
            return local[tuple(slice(start, start + extent) for start, extent in ends)]
        return local[self.start[0] : self.start[0] + prod(self.extent)].view(self.extent)

    def check(self, name: str, local: torch.Tensor) -> None:
        """Raise EtcError unless the box lies in its logical tensor and in `local`, the tensor `name`."""
        dims = {len(self.shape), len(self.offset), len(self.extent)}
        is_flat = local.dim() == 1 == len(self.start)
        fits = len(dims) == 1 and (is_flat or len(self.start) == len(self.extent) == local.dim())
        if fits:
            fits = self.box.intersect(whole(self.shape)) == self.box or not self.box.num_elements
            taken = (prod(self.extent),) if is_flat else self.extent
            ends = zip(self.start, taken, local.shape, strict=True)
            fits &= all(start >= 0 and start + extent <= size for start, extent, size in ends)
        if not fits:
            raise EtcError(
                f"TrainState.layout gave {self} for {name}, whose local shape is {tuple(local.shape)}; the box has to "
                "lie inside the logical tensor's shape, and from `start` on inside the local tensor"
            )


Layout = Callable[[str, torch.Tensor], Sequence[Piece] | None]
"""(a parameter's or buffer's fully qualified name, this rank's local tensor) -> the pieces that it holds; None for a
tensor that every rank has whole."""


def cut(
    shape: Sequence[int], dim: int, part: int, num_parts: int, blocks: Sequence[int] | None = None,
    name: str | None = None,
) -> list[Piece]:
    """This rank's pieces of a tensor that is cut along `dim`, as tensor parallelism does by hand.

    Args:
        shape: of the whole tensor.
        part, num_parts: this rank takes part number `part` of `num_parts` equal ones.
        blocks: sizes of the blocks that `dim` consists of, each of them cut alone: ``(hidden, hidden, hidden)`` for a
            fused query, key and value; ``(ffn, ffn)`` for a fused gate and up projection. One block by default.
        name: of the logical tensor, if it is not that of the local one.

    Raises:
        ValueError: the blocks do not make up the dim, or a block cannot be divided.
    """
    sizes = list(blocks) if blocks is not None else [shape[dim]]
    if sum(sizes) != shape[dim] or any(size % num_parts for size in sizes):
        raise ValueError(
            f"blocks {sizes} along dim {dim} of {tuple(shape)} cannot be cut into {num_parts} equal parts each; they "
            f"have to add up to {shape[dim]} and be multiples of {num_parts}"
        )
    pieces = []
    for before, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
        mine = size // num_parts
        pieces.append(
            Piece(
                tuple(shape), _along(shape, dim, before + part * mine, 0), _along(shape, dim, mine, None),
                _along(shape, dim, before // num_parts, 0), name,
            )
        )
    return pieces


def flat_range(shape: Sequence[int], start: int, end: int, at: int = 0, name: str | None = None) -> list[Piece]:
    """The pieces of a one-dim local tensor that holds elements [start, end) of a tensor of the whole `shape` in
    row-major order, from its own element `at` on."""
    pieces = []
    for box in boxes_of_range(whole(tuple(shape)), start, end):
        pieces.append(Piece(tuple(shape), box.offset, box.shape, (at,), name))
        at += box.num_elements
    return pieces


def _along(shape: Sequence[int], dim: int, value: int, others: int | None) -> tuple[int, ...]:
    """`value` at `dim`; elsewhere `others`, or where that is None the shape's own."""
    dim %= len(shape)
    return tuple(value if at == dim else size if others is None else others for at, size in enumerate(shape))
