"""A batch of samples on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import default_collate


def batch_of(data: Any, ids: Sequence[int], device: torch.device) -> Any:
    """``data[i]`` for all `ids`, stacked, on `device`. Samples may be anything that `default_collate` knows."""
    samples = [_sample(data, i) for i in ids]
    if all(isinstance(sample, torch.Tensor) for sample in samples):
        return torch.stack(samples).to(device, non_blocking=True)
    return _to_device(default_collate(samples), device)


def _sample(data: Any, index: int) -> Any:
    try:
        return data[index]
    except IndexError as error:
        raise IndexError(
            f"session.batch(data): data has no sample {index} ({error}); sample numbers count on from step to step: "
            "give data that takes any number, such as one that returns sample i % len, or run fewer steps"
        ) from error


def _to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_to_device(value, device) for value in batch]
    return batch
