"""A copy of a rank's state in host memory, taken by the main thread at a safe point while training stands still."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from etc_agent.adapters.choose import adapter_of
from etc_agent.errors import one_line
from etc_agent.integrations.host_state import rng_state
from etc_agent.integrations.train_state import TrainState
from etc_agent.state.boxes import whole
from etc_agent.state.layout import LogicalTensor, Manifest, Shard, by_tensor, shard_around
from etc_agent.worker.change.state.user_state import own_state
from etc_agent.worker.checkpoints.names import HOST, own_name, stream_name
from etc_agent.worker.live import LiveGeneration


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state before step `step`. `tensors`: what this rank may write, in host memory. `texts`: name -> JSON.
    `error`: why the state could not be copied, "" where it was."""

    step: int
    config: str
    tensors: Mapping[Shard, torch.Tensor] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


class Snapshots:
    """Takes snapshots of one rank, one after the other, in the same memory. The one before must not be in use.

    The first snapshot of a generation holds all of the rank's shards; later ones hold those that it wrote the first
    time (`learn`), as long as its shards are the same.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._held: Set[Shard] = frozenset()
        self._written: Manifest | None = None
        self._buffers: dict[Shard, torch.Tensor] = {}

    def take(self, live: LiveGeneration, step: int) -> Snapshot:
        """The state of `live`. Never raises for what the script's objects do: the error is part of the snapshot."""
        config = str(live.parallel.config)
        try:
            tensors = self._copied(live)
            texts = _texts(live, step)
        except Exception as error:
            return Snapshot(step, config, error=one_line(error))
        return Snapshot(step, config, tensors, texts)

    def learn(self, generation: int, held: Set[Shard], written: Manifest) -> None:
        """Of the shards `held` in a snapshot of `generation`, this rank has written `written`."""
        if generation == self._generation and held == set(self._buffers):
            self._written = written
            self._buffers = {shard: self._buffers[shard] for shard in written if shard in self._buffers}

    def forget(self) -> None:
        """The next snapshot holds everything again: the last one was not written."""
        self._written = None

    def _copied(self, live: LiveGeneration) -> dict[Shard, torch.Tensor]:
        device = live.parallel.device
        adapter = adapter_of(live.state)
        adapter.rest(live.state)
        held = adapter.held(live.state)
        stream = rng_state(device)
        held[_plain_shard(stream_name(live.parallel.coordinate), stream)] = stream
        if live.id != self._generation or held.keys() != self._held:
            self._generation, self._held, self._written = live.id, frozenset(held), None
        shards = by_tensor(held)
        buffers = {}
        for piece in held if self._written is None else self._written:
            shard = shard_around(shards, piece)
            source = held[shard][piece.box.within(shard.box)]
            buffer = self._buffers.get(piece)
            if buffer is None:
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=device.type == "cuda")
            buffer.copy_(source, non_blocking=True)
            buffers[piece] = buffer
        self._buffers = buffers
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return buffers


def _plain_shard(name: str, tensor: torch.Tensor) -> Shard:
    shape = tuple(tensor.shape)
    return Shard(LogicalTensor(name, shape, str(tensor.dtype).removeprefix("torch."), tensor.itemsize), whole(shape))


def _texts(live: LiveGeneration, step: int) -> dict[str, str]:
    """The state that is not tensors: rank 0's for all, and what this rank alone has."""
    texts = {}
    if live.parallel.rank == 0:
        texts[HOST] = json.dumps(_host(live, step))
    if own := _own(live.state):
        texts[own_name(live.parallel.rank)] = json.dumps(own)
    return texts


def _host(live: LiveGeneration, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "config": str(live.parallel.config),
        "global_batch": live.parallel.global_batch,
        "samples": step * live.parallel.global_batch,
        "state": adapter_of(live.state).host_state(live.state),
    }


def _own(state: TrainState) -> dict[str, Any]:
    found = {**own_state(state), "amendments": adapter_of(state).amendments(state).to_json()}
    return {key: value for key, value in found.items() if value}
