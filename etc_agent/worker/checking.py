"""What a script's `build` would be refused for, found out beforehand: every rank of some configs is built without peers
and without storage, and its layouts are compared; where it is small enough, its first values are made, too."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import permutations
from typing import Any, Final

import numpy as np
import torch

from etc_agent.adapters.choose import as_adapter
from etc_agent.adapters.protocol import Adapter
from etc_agent.errors import ConfigRefusedError, EtcError, named, one_line
from etc_agent.integrations.train_state import TrainState, init_steps
from etc_agent.integrations.weights import check_weights, fill_lost, has_lost_buffers, takes_weights
from etc_agent.parallel.config import ParallelConfig
from etc_agent.planner.transfers.coverage import find_coverage
from etc_agent.state.layout import Manifest
from etc_agent.torch_private.imports import import_compiler
from etc_agent.worker.change.state.amending import check_carried
from etc_agent.worker.data.division import GlobalBatch
from etc_agent.worker.model import build_state
from etc_agent.worker.settings import Settings
from etc_agent.worker.whole import build_buffers, build_whole
from etc_agent.worker.world.build import build_fake
from etc_agent.worker.world.swap import World, entered, install

_MOST_NAMES: Final = 5
_GENERATION: Final = 1


class Kind(StrEnum):
    """`REFUSED`: the job would not start, or a change would not take place. `UNSUITABLE`: `build` does what it may not,
    since it runs beside training. `LOST`: state that does not outlive a change. `UNTRIED`: what was not looked at."""

    REFUSED = "refused"
    UNSUITABLE = "unsuitable"
    LOST = "lost"
    UNTRIED = "not tried"


@dataclass(frozen=True, slots=True)
class Finding:
    """`where`: a config, a change, or the start of the job. `text`: what is the matter, in one line."""

    kind: Kind
    where: str
    text: str


@dataclass(frozen=True, slots=True)
class Built:
    """A config that the model can have. `most_bytes`: of model and optimizer state on one rank."""

    config: str
    num_ranks: int
    most_bytes: int
    num_tensors: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a check has come to."""

    built: tuple[Built, ...]
    findings: tuple[Finding, ...]

    @property
    def is_fine(self) -> bool:
        return not any(found.kind in (Kind.REFUSED, Kind.UNSUITABLE) for found in self.findings)


@dataclass(slots=True, eq=False)
class _Ranks:
    """All ranks of one config, on the meta device."""

    config: ParallelConfig
    worlds: list[World]
    states: list[TrainState]
    manifests: list[Manifest]

    def close(self) -> None:
        for world in self.worlds:
            world.close()


def check(
    script: Any, configs: Sequence[ParallelConfig], global_batch: GlobalBatch, seed: int = 0,
    most_bytes: int = 1 << 30,
) -> Answer:
    """Check `script`, a `build` function or an adapter, for a job that changes between `configs`.

    `most_bytes`: the first values are made where all ranks' take no more. `activate`, steps and extras' contents after
    them are not run.
    """
    install()
    import_compiler()  # as a session does; it changes the environment
    settings = Settings(torch.device("cpu"), global_batch, seed, 60.0, 60.0, 60.0, 60.0, None)
    checking = _Checking(as_adapter(script), settings)
    found = [checking.build(config) for config in configs]
    possible = [ranks for ranks in found if ranks is not None]
    try:
        for before, after in permutations(possible, 2):
            checking.change(before, after)
        if possible:
            checking.start(possible[0], most_bytes)
    finally:
        for ranks in possible:
            ranks.close()
    return checking.answer(possible)


class _Checking:
    def __init__(self, adapter: Adapter, settings: Settings) -> None:
        self._adapter = adapter
        self._settings = settings
        self._findings: dict[tuple[Kind, str], list[str]] = {}
        self._models: dict[int, TrainState] = {}

    def answer(self, possible: Sequence[_Ranks]) -> Answer:
        built = (
            Built(
                str(ranks.config), ranks.config.num_ranks,
                max(sum(shard.num_bytes for shard in manifest) for manifest in ranks.manifests),
                len({shard.tensor.name for manifest in ranks.manifests for shard in manifest}),
            )
            for ranks in possible
        )
        findings = (Finding(kind, _shown(places), text) for (kind, text), places in self._findings.items())
        return Answer(tuple(built), tuple(findings))

    def _find(self, kind: Kind, where: str, text: str) -> None:
        places = self._findings.setdefault((kind, text), [])
        if where not in places:
            places.append(where)

    def build(self, config: ParallelConfig) -> _Ranks | None:
        """Every rank of `config`; None where the model cannot have it."""
        ranks = _Ranks(config, [], [], [])
        where = str(config)
        try:
            self._settings.global_batch.check(config)
            for rank in range(config.num_ranks):
                self._build_rank(ranks, rank)
        except ConfigRefusedError as error:
            self._find(Kind.REFUSED, where, one_line(error))
        except (Exception, SystemExit) as error:
            text = one_line(error) if isinstance(error, EtcError) else f"build() raised {named(error)}"
            self._find(Kind.REFUSED, where, text)
        else:
            return ranks
        ranks.close()
        return None

    def _build_rank(self, ranks: _Ranks, rank: int) -> None:
        settings = self._settings
        world = build_fake(rank, ranks.config, settings.device)
        ranks.worlds.append(world)
        with self._watching(str(ranks.config)):
            state = build_state(self._adapter, world, settings.device, _GENERATION, settings.global_batch)
        if self._models.setdefault(id(state.model), state) is not state:
            self._find(
                Kind.UNSUITABLE, str(ranks.config), "build() returns the same model in two calls; make it new in each"
            )
        ranks.states.append(state)
        with entered(world):
            ranks.manifests.append(tuple(self._adapter.shards(state)))
            self._adapter.host_state(state)

    @contextlib.contextmanager
    def _watching(self, where: str) -> Iterator[None]:
        """Find what of the process has changed inside."""
        before = _of_process()
        yield
        after = _of_process()
        for name, value in before.items():
            if after[name] != value:
                text = f"build() changes {name} of the process, and it runs beside training: have it leave that alone"
                self._find(Kind.UNSUITABLE, where, text)
        _restore(before)

    def change(self, before: _Ranks, after: _Ranks) -> None:
        """Whether the state can go from one config to the other, and what of it does not."""
        where = f"{before.config} -> {after.config}"
        num_workers = max(len(before.manifests), len(after.manifests))
        old, new = (
            [*ranks.manifests, *[()] * (num_workers - len(ranks.manifests))] for ranks in (before, after)
        )
        names = [{shard.tensor.name for shard in manifest} for manifest in old]
        wanted = {shard.tensor.name for manifest in new for shard in manifest}
        said: list[dict[str, Any]] = [{"amendments": {}}] * num_workers
        views = self._views(before) | self._views(after)
        try:
            dropped = [name for name in check_carried(said, names, wanted) if name not in views]
            find_coverage(old, new)
        except (EtcError, ValueError) as error:
            self._find(Kind.REFUSED, where, one_line(error))
            return
        if dropped:
            self._find(Kind.LOST, where, f"build() does not make {_shown(dropped)} there, so the values end")

    def _views(self, ranks: _Ranks) -> set[str]:
        names = set()
        for world, state, manifest in zip(ranks.worlds, ranks.states, ranks.manifests, strict=True):
            with entered(world):
                held = {shard.tensor.name for shard in self._adapter.held(state)}
            names |= held - {shard.tensor.name for shard in manifest}
        return names

    def start(self, ranks: _Ranks, most_bytes: int) -> None:
        """Make the first values of all ranks."""
        where = f"the start with {ranks.config}"
        needed = sum(shard.num_bytes for manifest in ranks.manifests for shard in manifest)
        if needed > most_bytes:
            text = f"whether init writes all values: they take {needed:,} bytes for all ranks, more than {most_bytes:,}"
            self._find(Kind.UNTRIED, where, text)
            return
        try:
            self._make_first_values(ranks)
        except (Exception, SystemExit) as error:
            text = one_line(error) if isinstance(error, EtcError) else f"init raised {named(error)}"
            self._find(Kind.REFUSED, where, text)

    def _make_first_values(self, ranks: _Ranks) -> None:
        adapter, settings, first = self._adapter, self._settings, ranks.states[0]
        whole, buffers = None, dict[str, torch.Tensor]()
        if adapter.takes_module_values(first):
            whole = build_whole(adapter, settings, _GENERATION, 1)
        elif takes_weights(first) and any(map(has_lost_buffers, ranks.states)):
            buffers |= build_buffers(adapter, settings, _GENERATION)
        if takes_weights(first):
            with entered(ranks.worlds[0]):
                check_weights(ranks.states)
        for world, state in zip(ranks.worlds, ranks.states, strict=True):
            with entered(world):
                if buffers:
                    state.init = (lambda made: fill_lost(made, buffers), *init_steps(state.init))
                torch.manual_seed(settings.seed)
                adapter.start_values(state, settings.device, whole)


def _of_process() -> Mapping[str, Any]:
    return {
        "torch's random generator": torch.get_rng_state().tolist(), "Python's random generator": random.getstate(),
        "NumPy's random generator": repr(np.random.get_state()), "the default dtype": torch.get_default_dtype(),
        "the environment": dict(os.environ), "whether gradients are computed": torch.is_grad_enabled(),
        "the number of threads": torch.get_num_threads(),
    }


def _restore(before: Mapping[str, Any]) -> None:
    torch.set_rng_state(torch.tensor(before["torch's random generator"], dtype=torch.uint8))
    torch.set_default_dtype(before["the default dtype"])
    torch.set_grad_enabled(before["whether gradients are computed"])


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
