"""Filling a fresh generation from the newest checkpoint that is complete, whatever config that was written with."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp

from etc_agent.adapters.choose import adapter_of
from etc_agent.errors import EtcError, one_line
from etc_agent.integrations.amendments import Amendments
from etc_agent.integrations.dcp_boxes import BoxLoadPlanner, logical_tensors
from etc_agent.integrations.host_state import rng_state
from etc_agent.integrations.sources import read_boxes
from etc_agent.integrations.train_state import TrainState
from etc_agent.parallel.config import ParallelConfig
from etc_agent.state.boxes import whole
from etc_agent.state.layout import LogicalTensor, Shard
from etc_agent.worker.change.exchange import broadcast_json, gather_json
from etc_agent.worker.change.state.user_state import load_own_state
from etc_agent.worker.checkpoints import folder as folders
from etc_agent.worker.checkpoints.names import HOST, own_name, stream_name
from etc_agent.worker.context import ParallelContext
from etc_agent.worker.settings import Settings
from etc_agent.worker.world.swap import World

_log = logging.getLogger(__name__)

_MOST_NAMES: Final = 5


@dataclass(frozen=True, slots=True)
class Loaded:
    """A state with a checkpoint's values, and the next `step`. `stream`: of this rank's coordinate, None where the
    checkpoint has none of it."""

    state: TrainState
    step: int
    stream: torch.Tensor | None


def load_newest(
    build: Callable[[], TrainState], given: Path, settings: Settings, parallel: ParallelContext, world: World
) -> Loaded | None:
    """The newest complete checkpoint in rank 0's folder `given`, in a state that `build` makes on the meta device; None
    where there is none. Collective. One whose files turn out to be unreadable is left out with a warning, and the one
    before it is taken.

    Raises:
        EtcError: there are complete checkpoints, and none of them can be read; or the newest one is of another model.
    """
    everyone = world.groups[0]
    left_out: list[str] = []
    while True:
        found = [str(given), *_newest(given, left_out)] if parallel.rank == 0 else None
        folder, name, said = broadcast_json(everyone, 0, found)
        if not name:
            if left_out:
                raise EtcError(f"no checkpoint in {folder} can be read ({', '.join(left_out)}); see the warnings above")
            return None
        loaded, error, is_final = None, "", False
        state = build()
        try:
            loaded = _Reading(Path(folder, name), settings, parallel).into(state)
        except EtcError as different:
            error, is_final = one_line(different), True
        except (Exception, dcp.CheckpointException) as unreadable:
            error = _reason(unreadable)
        answers = gather_json(everyone, [error, is_final])
        failed = [(text, final) for text, final in answers if text]
        if not failed and loaded is not None:
            if parallel.rank == 0:
                _log.warning("continuing from checkpoint of step %d (%s)", loaded.step, said)
            return loaded
        text, final = min(failed, key=lambda each: not each[1])
        if final:
            raise EtcError(f"{Path(folder, name)}: {text}")
        if parallel.rank == 0:
            _log.warning("checkpoint %s cannot be read, and the one before it is taken: %s", name, text)
        left_out.append(name)


def _newest(folder: Path, left_out: Sequence[str]) -> tuple[str, str]:
    """The name of the newest complete checkpoint, and what is lost by going on from it; twice "" if there is none."""
    for path in folders.newest_first(folder):
        if path.name in left_out:
            continue
        try:
            marker = folders.check(path)
        except (EtcError, OSError) as error:
            _log.warning("checkpoint %s is not complete and is left out: %s", path.name, error)
            continue
        return path.name, folders.lost_since(marker, folders.read_progress(folder))
    return "", ""


class _Reading:
    """Reads one checkpoint."""

    def __init__(self, path: Path, settings: Settings, parallel: ParallelContext) -> None:
        self._path, self._settings, self._parallel = path, settings, parallel
        metadata = dcp.FileSystemReader(path).read_metadata()
        self._known = logical_tensors(metadata)
        names = tuple(name for name in metadata.state_dict_metadata if name not in self._known)
        texts = BoxLoadPlanner({}, names)
        self._load(texts)
        self._host: dict[str, Any] = json.loads(texts.texts[HOST])
        self._config = ParallelConfig.parse(self._host["config"])
        self._own: list[dict[str, Any]] = [
            {"extras": {}, "parameters": {}, "amendments": {}, **json.loads(texts.texts.get(own_name(rank), "{}"))}
            for rank in range(self._config.num_ranks)
        ]

    def into(self, state: TrainState) -> Loaded:
        """Give `state`, which is on the meta device, memory and the checkpoint's values.

        Raises:
            EtcError: the checkpoint is of another model or optimizer; the message names what differs.
        """
        parallel = self._parallel
        written_with = self._host["global_batch"]
        if written_with != parallel.global_batch and parallel.rank == 0:
            _log.warning(
                "the checkpoint was written with a global batch of %d, and it is %d now: step %d begins with sample %d",
                written_with, parallel.global_batch, self._host["step"], self._host["step"] * parallel.global_batch,
            )
        adapter = adapter_of(state)
        adapter.amend(state, Amendments.merged([own["amendments"] for own in self._own]))
        self._check(state)
        stream = self._stream()
        state.init = lambda made: self._fill(made, stream)
        step = adapter.start_values(state, parallel.device, None)
        adapter.load_host_state(state, self._host["state"])
        load_own_state(state, dict(enumerate(self._own)), self._config, parallel.config, parallel.rank)
        return Loaded(state, step, None if stream is None else stream[1])

    def _fill(self, state: TrainState, stream: tuple[Shard, torch.Tensor] | None) -> int:
        targets = adapter_of(state).shards(state)
        if stream is not None:
            targets[stream[0]] = stream[1]
        self._load(BoxLoadPlanner(targets))
        return self._host["step"]

    def _check(self, state: TrainState) -> None:
        wanted = {shard.tensor for shard in adapter_of(state).shards(state)}
        missing = sorted(tensor.name for tensor in wanted if tensor.name not in self._known)
        if missing:
            raise EtcError(f"the checkpoint has no {_shown(missing)}; it is of another model or optimizer")
        for tensor in wanted:
            there = self._known[tensor.name]
            if there != tensor:
                raise EtcError(
                    f"{tensor.name} is {there.dtype} {there.shape} in the checkpoint, and build() makes it "
                    f"{tensor.dtype} {tensor.shape}"
                )
        lost = {name for name in self._known if name.startswith("optimizer.")} - {
            shard.tensor.name for shard in adapter_of(state).held(state)
        }
        ours = {f"optimizer.{tensor.name.removeprefix('model.')}" for tensor in wanted}
        homeless = sorted(name for name in lost if name.rpartition(".")[0] in ours)
        if homeless:
            raise EtcError(f"the optimizer that build() makes has no place for {_shown(homeless)}")

    def _stream(self) -> tuple[Shard, torch.Tensor] | None:
        """This rank's random stream, if the checkpoint has it for this kind of device."""
        buffer = torch.empty_like(rng_state(self._parallel.device))
        shape = tuple(buffer.shape)
        tensor = LogicalTensor(stream_name(self._parallel.coordinate), shape, "uint8", 1)
        return (Shard(tensor, whole(shape)), buffer) if self._known.get(tensor.name) == tensor else None

    def _load(self, planner: BoxLoadPlanner) -> None:
        read_boxes(self._path, planner)


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _reason(error: BaseException) -> str:
    if isinstance(error, dcp.CheckpointException):
        error = next((failure[0] for failure in error.failures.values()), error)
    return one_line(error)
