"""An independent judge of migrations: gather everything, compare bits.

It reads the files that workers write under ETC_VERIFY (see `etc_agent.worker.change.state.shard_dumps`), fills whole
logical arrays from them and compares the two sides of a change. numpy only; no code of the project.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Logical = dict[str, np.ndarray]
"""Name -> the whole tensor as raw bytes: its shape, with one more dim of itemsize."""


def gathered(directory: Path, generation: int, side: str, num_ranks: int) -> Logical:
    """The whole logical state that `side` ("old" or "new") of a change holds, from all its ranks' files.

    Fails where an element is held by no rank, where two replicas differ, or where ranks disagree on a tensor.
    """
    arrays: Logical = {}
    filled: dict[str, np.ndarray] = {}
    dtypes: dict[str, str] = {}
    for rank in range(num_ranks):
        path = directory / f"gen{generation}-{side}-rank{rank}.npz"
        assert path.exists(), f"{path.name} was not written"
        for entry, payload in _entries(path):
            name, shape, size = entry["name"], tuple(entry["shape"]), entry["itemsize"]
            if name not in arrays:
                arrays[name] = np.zeros((*shape, size), dtype=np.uint8)
                filled[name] = np.zeros(shape, dtype=bool)
                dtypes[name] = entry["dtype"]
            assert arrays[name].shape == (*shape, size), f"rank {rank}: {name} has another shape than elsewhere"
            assert dtypes[name] == entry["dtype"], f"rank {rank}: {name} has another dtype than elsewhere"
            extent = tuple(entry["extent"])
            where = tuple(slice(o, o + n) for o, n in zip(entry["offset"], extent, strict=True))
            part = payload.reshape(*extent, size)
            known = filled[name][where]
            assert np.array_equal(arrays[name][where][known], part[known]), f"rank {rank}: replicas of {name} differ"
            arrays[name][where] = part
            filled[name][where] = True
    holes = [name for name, mask in filled.items() if not mask.all()]
    assert not holes, f"{side} side of generation {generation} lacks parts of {holes}"
    return arrays


def assert_same_bits(old: Logical, new: Logical) -> None:
    """Both sides hold the same tensors, bit for bit."""
    assert set(old) == set(new), f"only old: {sorted(set(old) - set(new))}; only new: {sorted(set(new) - set(old))}"
    for name, array in old.items():
        assert array.shape == new[name].shape, f"{name}: shape {array.shape} became {new[name].shape}"
        differing = int((array != new[name]).sum())
        assert differing == 0, f"{name}: {differing} of {array.size} bytes differ"


def _entries(path: Path) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    with np.load(path) as file:
        for number, entry in enumerate(json.loads(file["index"].tobytes())):
            yield entry, file[f"b{number}"]
