"""Where weights are read from: tensors in memory, safetensors files, files of `torch.save`, checkpoints of
torch.distributed.checkpoint. Of each tensor only the parts that are asked for are read."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from etc_agent.errors import EtcError, named
from etc_agent.integrations.dcp_boxes import BoxLoadPlanner, logical_tensors
from etc_agent.state.boxes import Box, whole
from etc_agent.state.layout import Shard

_SAVED = (".pt", ".pth", ".bin")


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The `box` of the source's tensor `name`, to be written into the plain tensor `target` of the box's shape."""

    name: str
    box: Box
    target: torch.Tensor


class Source(Protocol):
    """`names`: of all its tensors, under the names that they have there."""

    @property
    def names(self) -> Set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def load(self, parts: Sequence[Part]) -> None:
        """Read the parts, cast to their targets' dtypes."""


def open_source(given: Mapping[str, Any] | str | Path) -> Source:
    """The source that `given` is: a state dict, a safetensors file or a folder of such, a file of `torch.save`, or the
    folder of a checkpoint of torch.distributed.checkpoint.

    Raises:
        EtcError: there is nothing of the kind; the message says what was found.
    """
    if isinstance(given, Mapping):
        return Tensors(given)
    path = Path(given)
    if not path.exists():
        raise EtcError(f"TrainState.init is {str(path)!r}: there is no such file or folder, and it is not 'module'")
    if (path / ".metadata").is_file():
        return Checkpoint(path)
    if path.is_dir():
        return Safetensors(_files_in(path))
    if path.suffix == ".safetensors":
        return Safetensors({name: path for name in _opened(path).keys()})  # noqa: SIM118
    if path.suffix in _SAVED:
        return Tensors(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    raise EtcError(
        f"TrainState.init is {str(path)!r}; give a .safetensors file, a folder of them, a file of torch.save "
        f"({', '.join(_SAVED)}), or the folder of a torch.distributed.checkpoint"
    )


class Tensors:
    """Whole tensors by name: a full state dict, or a memory-mapped file of one."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        for name, value in given.items():
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                raise EtcError(
                    f"TrainState.init has a {type(value).__name__} as {name!r}; give a full state dict: names of the "
                    "model's parameters and buffers, each with its whole plain tensor"
                )
        self._tensors = given

    @property
    def names(self) -> Set[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def load(self, parts: Sequence[Part]) -> None:
        for part in parts:
            tensor = self._tensors[part.name]
            part.target.copy_(tensor[part.box.within(whole(tuple(tensor.shape)))])


class Safetensors:
    """`files`: name of a tensor -> the file that holds it."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self._open: dict[Path, safe_open] = {}

    @property
    def names(self) -> Set[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def load(self, parts: Sequence[Part]) -> None:
        for part in sorted(parts, key=lambda part: (self._files[part.name], part.name)):
            if not part.box.shape:
                part.target.copy_(self._file(part.name).get_tensor(part.name))
            elif part.box.num_elements:
                part.target.copy_(self._slice(part.name)[part.box.within(whole(self.shape(part.name)))])
        self._open.clear()

    def _slice(self, name: str) -> Any:
        try:
            return self._file(name).get_slice(name)
        except Exception as error:
            raise EtcError(f"{self._files[name]} has no readable tensor {name}: {named(error)}") from error

    def _file(self, name: str) -> safe_open:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = _opened(path)
        return self._open[path]


class Checkpoint:
    """A checkpoint of torch.distributed.checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tensors = logical_tensors(dcp.FileSystemReader(path).read_metadata())

    @property
    def names(self) -> Set[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def load(self, parts: Sequence[Part]) -> None:
        targets: dict[Shard, torch.Tensor] = {}
        again: list[tuple[torch.Tensor, torch.Tensor]] = []
        for part in parts:
            first = targets.setdefault(Shard(self._tensors[part.name], part.box), part.target)
            if first is not part.target:
                again.append((part.target, first))
        read_boxes(self._path, BoxLoadPlanner(targets))
        for target, first in again:
            target.copy_(first)


def read_boxes(path: Path, planner: BoxLoadPlanner) -> None:
    """Have `planner` read from a checkpoint of torch.distributed.checkpoint, on this rank alone."""
    with warnings.catch_warnings(action="ignore"):  # that torch.distributed is not used
        dcp.load({}, storage_reader=dcp.FileSystemReader(path), planner=planner, no_dist=True)


def _files_in(folder: Path) -> dict[str, Path]:
    """As Hugging Face lays them out: an index where there are several files."""
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise EtcError(f"{folder} has several indices ({_listed(indices)}); give one .safetensors file")
    if indices:
        weights: dict[str, str] = json.loads(indices[0].read_text())["weight_map"]
        absent = sorted({file for file in weights.values() if not (folder / file).is_file()})
        if absent:
            raise EtcError(f"{indices[0]} lists {', '.join(absent[:5])}, and there is no such file in {folder}")
        return {name: folder / file for name, file in weights.items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EtcError(
            f"TrainState.init is the folder {str(folder)!r}, which has no *.safetensors and no .metadata of a "
            "torch.distributed.checkpoint"
        )
    found: dict[str, Path] = {}
    for path in files:
        for name in _opened(path).keys():  # noqa: SIM118
            if found.setdefault(name, path) != path:
                both = f"{found[name].name} and {path.name} in {folder}"
                raise EtcError(f"{both} have a tensor {name} each; give one of the files")
    return found


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise EtcError(f"{path} is no readable safetensors file: {named(error)}") from error


def _listed(paths: Iterable[Path]) -> str:
    return ", ".join(path.name for path in paths)


