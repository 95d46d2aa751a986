"""Samples of bytes from text files, in an order that depends on the seed and the sample's number alone."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from gpt.options import OptionsError

MAX_BYTES = 16 << 20
"""What is read of a folder at most: enough for any demonstration, and quick to load."""


class ByteSamples:
    """``samples[i]``: int64 tensor of `sequence` + 1 bytes. `i` is unbounded: each pass over the text has its order.

    Raises:
        OptionsError: there is no text at `path`, or too little.
    """

    def __init__(self, path: Path | None, sequence: int, seed: int) -> None:
        source = path or Path(sysconfig.get_path("stdlib"))
        try:
            self._text = _read(source, "" if path else ".py")
        except OSError as error:
            raise OptionsError(f"--data {error.filename} cannot be read: {error.strerror}") from None
        self._sequence = sequence
        self._num_windows = (len(self._text) - 1) // sequence
        if self._num_windows < 1:
            raise OptionsError(
                f"--data {source} holds {len(self._text)} bytes; a sample needs {sequence + 1}, give more text"
            )
        num_windows = self._num_windows
        self._order = lru_cache(maxsize=2)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(num_windows))

    def __getitem__(self, index: int) -> torch.Tensor:
        epoch, position = divmod(index, self._num_windows)
        start = int(self._order(epoch)[position]) * self._sequence
        return torch.from_numpy(self._text[start : start + self._sequence + 1].astype(np.int64))


def _read(path: Path, suffix: str) -> np.ndarray:
    if not path.exists():
        raise OptionsError(f"--data {path} does not exist; give a text file or a folder of them")
    if path.is_file():
        return np.frombuffer(path.read_bytes(), dtype=np.uint8)
    chunks: list[bytes] = []
    num_bytes = 0
    for file in _files(path, suffix):
        if num_bytes >= MAX_BYTES:
            break
        chunks.append(file.read_bytes())
        num_bytes += len(chunks[-1])
    return np.frombuffer(b"".join(chunks), dtype=np.uint8)


def _files(folder: Path, suffix: str) -> Iterator[Path]:
    """The files below `folder` in the order of their names, without hidden ones and installed packages."""
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry.name in ("site-packages", "dist-packages", "__pycache__"):
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _files(entry, suffix)
        elif entry.is_file() and entry.name.endswith(suffix):
            yield entry
