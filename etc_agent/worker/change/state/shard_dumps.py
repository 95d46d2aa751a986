"""Writing this worker's shards to files around a migration, for an independent check (ETC_VERIFY=DIR).

One file per worker and side, ``gen<id>-old-rank<r>.npz`` and ``gen<id>-new-rank<r>.npz``: `id` is the generation
being entered on both sides, `r` the rank in the old or the new generation. ``index`` is JSON in UTF-8 bytes, a list of
``{"name", "shape", "dtype", "itemsize", "offset", "extent"}``; entry i's bytes are the uint8 array ``b<i>``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import numpy as np
import torch

from etc_agent.state.layout import Shard


def dump_shards(
    directory: str, generation: int, side: str, rank: int, shards: Mapping[Shard, torch.Tensor]
) -> None:
    """Write `shards` with their bytes; `side` is ``old`` or ``new``. The file appears whole or not at all."""
    index = [
        {
            "name": shard.tensor.name,
            "shape": shard.tensor.shape,
            "dtype": shard.tensor.dtype,
            "itemsize": shard.tensor.itemsize,
            "offset": shard.box.offset,
            "extent": shard.box.shape,
        }
        for shard in shards
    ]
    arrays = {f"b{i}": _bytes(tensor) for i, tensor in enumerate(shards.values())}
    arrays["index"] = np.frombuffer(json.dumps(index).encode(), dtype=np.uint8)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    path = os.path.join(directory, f"gen{generation}-{side}-rank{rank}.npz")
    with open(f"{path}.part", "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    os.replace(f"{path}.part", path)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
