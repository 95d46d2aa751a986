"""Marks: memory without a value is filled with a bit pattern that no computation yields, so that it can be
recognised."""

from __future__ import annotations

from typing import Final

import torch

from etc_agent.torch_private.tensors import num_writes

_MARKS: Final = {
    1: (torch.uint8, 0x7F), 2: (torch.int16, 0x7FFD), 4: (torch.int32, 0x7FFD7FFD), 8: (torch.int64, 0x7FFD7FFD7FFD7FFD)
}
"""Bytes per element -> its bits as an integer. As a float each is a NaN that arithmetic passes on but never makes."""

_NUM_ELEMENTS_AT_ONCE: Final = 1 << 24


def marked(meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new tensor like `meta`, full of marks."""
    tensor = torch.empty_like(meta, device=device)
    bits, mark = _bits(tensor)
    bits.fill_(mark)
    return tensor


def is_written(local: torch.Tensor, num_writes_before: int) -> bool:
    """Whether every element of a plain tensor that was `marked` has got a value. `num_writes_before`: its `num_writes`
    when it was marked. One byte can hold the mark by right: there a write of any part counts."""
    if not local.numel():
        return True
    bits, mark = _bits(local)
    if bits.element_size() == 1:
        return num_writes(local) != num_writes_before or bool((bits != mark).any())
    if not bits.is_contiguous():
        return not bool((bits == mark).any())
    return not any(bool((part == mark).any()) for part in bits.view(-1).split(_NUM_ELEMENTS_AT_ONCE))


def _bits(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`tensor` as integers, sharing its memory, and the mark of that width."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    kind, mark = _MARKS[real.element_size()]
    return real.view(kind), mark
