"""One worker's share of a copy set: its own state at the set's step, and the blocks that it keeps of others' then."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from etc_agent.adapters.choose import adapter_of
from etc_agent.errors import EtcError
from etc_agent.integrations.host_state import load_extra, rng_state, set_rng_state
from etc_agent.integrations.json_values import decode
from etc_agent.integrations.train_state import TrainState
from etc_agent.migration.memory.bits import as_bits, copy_bits, finish_copies
from etc_agent.parallel.config import Coordinate
from etc_agent.planner.copies.keepers import Block
from etc_agent.state.layout import Manifest, Shard, by_tensor, shard_around
from etc_agent.worker.change.state.rng import stream_of
from etc_agent.worker.change.state.user_state import own_state, rules_of
from etc_agent.worker.redundancy.layout import BlockLayout, OwnLayout, host_buffer

_MOST_NAMES = 5


class ChangedError(EtcError):
    """The worker holds other shards than when the layout of its copy was made."""


def held_now(state: TrainState, device: torch.device, at: Coordinate) -> dict[Shard, torch.Tensor]:
    """Everything that a copy contains: each tensor of the state once, and the random stream of the coordinate `at`.
    Call it on the main thread, at a safe point."""
    adapter = adapter_of(state)
    adapter.rest(state)
    held = adapter.shards(state)
    stream = rng_state(device)
    held[stream_of(at, stream)] = stream
    return held


@dataclass(slots=True, eq=False)
class Copies:
    """Tensors to be copied, each onto the target at its place; both as bits."""

    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """Copies of parameters and optimizer state, which nothing writes to before the next update. `ready`: on a GPU, that
    the update before is complete, and the buffers are copied."""

    copies: Copies
    device: torch.device
    ready: torch.cuda.Event | None

    @classmethod
    def of(cls, copies: Copies, device: torch.device) -> Self:
        if device.type != "cuda":
            return cls(copies, device, None)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))
        return cls(copies, device, ready)

    def finish(self) -> None:
        """Make the copies; on a GPU on a stream of their own, beside training. From any thread."""
        if self.ready is None:
            copy_bits(self.copies.targets, self.copies.sources)
            return
        stream = torch.cuda.Stream(self.device)
        stream.wait_event(self.ready)
        with torch.cuda.stream(stream):
            copy_bits(self.copies.targets, self.copies.sources)
        stream.synchronize()


@dataclass(slots=True, eq=False)
class CopySet:
    """`number`: copy sets of a generation count from 1. `step`: the next step to run in this state.

    `blocks`: of all ranks. `own`: this worker's state in `layout`. `kept`: number of a block -> its bytes, in
    `kept_layouts`. `shared`: the host state that is equal on every rank; `own_values`: what this rank has of its own
    (`own_state`); `kept_values`: the same of owners, by rank. All three as JSON. `host_streams`: the states of Python's
    and NumPy's own generators, which no change carries, but to which this worker goes back.
    """

    blocks: tuple[Block, ...]
    layout: OwnLayout
    kept_layouts: Mapping[int, BlockLayout]
    own: torch.Tensor
    kept: Mapping[int, torch.Tensor]
    number: int = 0
    step: int = 0
    shared: str = ""
    own_values: str = ""
    kept_values: dict[int, str] = field(default_factory=dict)
    host_streams: tuple[Any, Any] | None = None

    @classmethod
    def allocate(
        cls, blocks: tuple[Block, ...], layout: OwnLayout, kept_layouts: Mapping[int, BlockLayout], device: torch.device
    ) -> CopySet:
        kept = {number: host_buffer(block.num_bytes, device) for number, block in kept_layouts.items()}
        return cls(blocks, layout, kept_layouts, host_buffer(layout.num_bytes, device), kept)

    @property
    def num_bytes(self) -> int:
        return self.own.numel() + sum(buffer.numel() for buffer in self.kept.values())

    def piece(self, number: int) -> torch.Tensor:
        """What the keeper of that block gets of this worker, a view of `own`."""
        return self.layout.sent[number].range_of(self.own)

    def take(self, state: TrainState, device: torch.device, at: Coordinate, number: int, step: int) -> Pending:
        """Copy the buffers, to which a forward pass may write; returns the copies of all else, to be made before the
        next update.

        Raises:
            ChangedError: the worker holds other shards than the layout has.
            EtcError: a value of the script cannot be written as JSON.
        """
        held = held_now(state, device, at)
        check_same(self.layout.manifest, tuple(held))
        buffers = adapter_of(state).volatile(state)
        at_once, later = Copies(), Copies()
        shards = by_tensor(held)
        for place in self.layout.places:
            shard = shard_around(shards, place.part)
            bits = as_bits(held[shard])
            copies = at_once if shard in buffers else later
            copies.sources.append(bits if place.part == shard else bits[place.part.box.within(shard.box)])
            copies.targets.append(place.bits(self.own))
        copy_bits(at_once.targets, at_once.sources)
        self.number, self.step = number, step
        self.shared, self.own_values = json.dumps(adapter_of(state).host_state(state)), json.dumps(own_state(state))
        self.host_streams = random.getstate(), np.random.get_state()
        self.kept_values.clear()
        return Pending.of(later, device)

    def restore(self, state: TrainState, device: torch.device, at: Coordinate) -> None:
        """Put this worker's state back to that of `step`: tensors in place, host state, random stream; gradients are
        dropped.

        Raises:
            ChangedError: the worker holds other shards than it did then.
            EtcError: the script's objects do not take their values back.
        """
        held = held_now(state, device, at)
        check_same(self.layout.manifest, tuple(held))
        copies = Copies()
        for shard, places in self.layout.shards().items():
            for place in places:
                copies.targets.append(as_bits(held[shard])[place.part.box.within(shard.box)])
                copies.sources.append(place.bits(self.own))
        copy_bits(copies.targets, copies.sources)
        finish_copies(device)
        adapter = adapter_of(state)
        adapter.drop_gradients(state)
        adapter.load_host_state(state, json.loads(self.shared))
        _load_own(state, json.loads(self.own_values))
        # Last: the script's objects may draw from the stream while they load.
        assert self.host_streams is not None, "taken"
        python, numpy = self.host_streams
        stream = held[stream_of(at, rng_state(device))]
        random.setstate(python)
        np.random.set_state(numpy)
        set_rng_state(device, stream)


def check_same(then: Manifest, now: Manifest) -> None:
    """Raise ChangedError unless both are the same shards."""
    changed = set(then) ^ set(now)
    if changed:
        names = sorted({shard.tensor.name for shard in changed})
        others = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        raise ChangedError(
            f"{', '.join(names[:_MOST_NAMES])}{others}: added, removed, or of another shape, dtype or sharding since"
        )


def _load_own(state: TrainState, own: dict[str, Any]) -> None:
    """Give the state what this rank itself has said (`own_state`)."""
    adapter_of(state).load_parameter_values(state, [own["parameters"]])
    for name, rule in rules_of(state).items():
        if rule != "replicated":
            load_extra(name, state.extras[name], decode(own["extras"][name]))
