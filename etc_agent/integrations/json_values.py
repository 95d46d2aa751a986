"""Python values as JSON and back, exactly: tuples, dicts with any scalar keys, counters, 0-dim tensors, all floats."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from etc_agent.errors import EtcError

Json = Any
"""None, bool, int, float, str, or lists and str-keyed dicts of them. Python's json keeps floats bit for bit."""


def encode(value: Any, path: str) -> Json:
    """`value` as JSON. Lists stay lists; what JSON has no form for becomes a dict with one tag.

    Raises:
        EtcError: `value` holds something that cannot be written as JSON; the message names it by `path`.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [encode(item, f"{path}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, Counter):
        return {"counter": _pairs(value, path)}
    if isinstance(value, dict):
        return {"dict": _pairs(value, path)}
    if isinstance(value, np.bool | np.integer | np.floating) and type(value.item()) in (bool, int, float):
        return {"numpy": value.item(), "dtype": value.dtype.name}
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return {"scalar": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    raise EtcError(
        f"{path} is a {type(value).__name__}, which cannot be carried to another generation; expected None, numbers, "
        "strings, 0-dim tensors, and lists, tuples or dicts of them (larger tensors belong in the model's buffers)"
    )


def decode(value: Json) -> Any:
    """The value that `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(decode(item) for item in value["tuple"])
    if "numpy" in value:
        return np.dtype(value["dtype"]).type(value["numpy"])
    if "scalar" in value:
        return torch.tensor(value["scalar"], dtype=getattr(torch, value["dtype"]), device="cpu")
    if "counter" in value:
        return Counter({decode(key): decode(item) for key, item in value["counter"]})
    return {decode(key): decode(item) for key, item in value["dict"]}


def _pairs(value: dict[Any, Any], path: str) -> list[list[Json]]:
    return [[encode(key, f"a key of {path}"), encode(item, f"{path}.{key}")] for key, item in value.items()]
