"""From a model description and a parallel config to the layout: which virtual rank holds which boxes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm, prod

import numpy as np
from numpy.typing import NDArray

from etc_agent.parallel.config import ParallelConfig
from etc_agent.state.algebra import flat_range
from etc_agent.state.boxes import Box
from etc_agent.state.layout import Layout, LogicalTensor, Manifest, Shard
from etc_agent.state.model import ModelDescription, StateKind, TensorSpec

_BUCKET_MULTIPLE = 128
"""ZeRO-1 buffers are padded to a multiple of this and of the number of replicas, as Megatron does."""

_LAYERS = 2
"""The section of the repeated layers."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One logical parameter: its full name, its spec and the stages that hold it."""

    name: str
    spec: TensorSpec
    stages: tuple[int, ...]


def even_stages(num_layers: int, pp: int, interleave: int = 1) -> tuple[int, ...]:
    """Layer -> stage. The first stages get the extra layers; with `interleave` every stage has that many chunks."""
    chunks = pp * interleave
    base, extra = divmod(num_layers, chunks)
    counts = [base + (chunk < extra) for chunk in range(chunks)]
    return tuple(chunk % pp for chunk, count in enumerate(counts) for _ in range(count))


def refusal(model: ModelDescription, config: ParallelConfig, *, interleave: int = 1) -> str | None:
    """Why `model` cannot be trained under `config`, in one line; None where it can."""
    if model.num_layers < config.pp * interleave:
        return f"{model.num_layers} layers do not fill {config.pp * interleave} stages (pp)"
    if model.num_heads % config.tp:
        return f"{model.num_heads} attention heads are not divisible by tp={config.tp}"
    if model.kv_heads % config.tp and config.tp % model.kv_heads:
        return f"{model.kv_heads} kv heads and tp={config.tp}: neither divides the other"
    if config.ep > 1 and not model.num_experts:
        return f"ep={config.ep}, but the model has no experts"
    if model.num_experts % config.ep:
        return f"{model.num_experts} experts are not divisible by ep={config.ep}"
    return None


class Sharding:
    """The layout of `model` under `config`, computed on demand.

    `stages`: layer -> stage, for uneven or interleaved pipelines; even by default.

    Raises:
        ValueError: the model cannot be cut so.
    """

    def __init__(
        self,
        model: ModelDescription,
        config: ParallelConfig,
        *,
        stages: Sequence[int] | None = None,
        interleave: int = 1,
    ) -> None:
        reason = refusal(model, config, interleave=interleave if stages is None else 1)
        if reason:
            raise ValueError(f"{model.name} under {config}: {reason}")
        self.model = model
        self.config = config
        self.stages = tuple(stages) if stages is not None else even_stages(model.num_layers, config.pp, interleave)
        if len(self.stages) != model.num_layers or set(self.stages) != set(range(config.pp)):
            raise ValueError(
                f"{model.name} under {config}: the stage list has {len(self.stages)} entries on stages "
                f"{sorted(set(self.stages))}; expected {model.num_layers} entries that use stages 0 to {config.pp - 1}"
            )
        self.num_replicas = config.dp * config.cp
        self._replicas = np.arange(self.num_replicas)
        self._logical: dict[str, LogicalTensor] = {}
        self._layer_specs = model.layer_specs()
        self._embedding = model.embedding_specs()
        self._head = model.head_specs()

    def units(self) -> Iterator[Unit]:
        """Every logical parameter, in the order of the model."""
        for number, (specs, repeats) in enumerate(self.sections()):
            for index, stages in enumerate(repeats):
                prefix = f"layers.{index}." if number == _LAYERS else ""
                for spec in specs:
                    yield Unit(prefix + spec.name, spec, stages)

    def sections(self) -> list[tuple[list[TensorSpec], list[tuple[int, ...]]]]:
        """The same, repeated parts together: (specs, the stages of each repetition)."""
        last = self.config.pp - 1
        tied = self.model.tied and last > 0
        word, *others = self._embedding
        return [
            ([word], [(0, last) if tied else (0,)]),
            (others, [(0,)]),
            (self._layer_specs, [(stage,) for stage in self.stages]),
            (self._head, [(last,)]),
        ]

    def logical(self, unit: Unit, kind: StateKind) -> LogicalTensor:
        name = f"{kind.name}.{unit.name}"
        known = self._logical.get(name)
        if known is None:
            known = self._logical[name] = LogicalTensor(name, unit.spec.shape, kind.dtype, kind.itemsize)
        return known

    def is_sharded(self, kind: StateKind) -> bool:
        """Whether `kind` is split over the replicas (ZeRO-1)."""
        return self.model.zero1 and kind.sharded

    def ranks(self, stages: Sequence[int], parts: Sequence[int], expert: int | None) -> NDArray[np.int64]:
        """All ranks of `stages` with a tp index in `parts`; with `expert`, only those that hold this expert.

        Ascending, as `stages` and `parts` must be.
        """
        replicas = self._replicas
        if expert is None and len(stages) == len(parts) == 1:  # by far the most frequent
            return (replicas + stages[0] * self.num_replicas) * self.config.tp + parts[0]
        if expert is not None:
            replicas = replicas[replicas % self.config.ep == self.expert_home(expert)]
        rows = (np.asarray(stages)[:, None] * self.num_replicas + replicas[None, :]).reshape(-1)
        return (rows[:, None] * self.config.tp + np.asarray(parts)[None, :]).reshape(-1)

    def expert_home(self, expert: int) -> int:
        """The ep part that holds `expert`."""
        return expert // (self.model.num_experts // self.config.ep)

    def boxes(self, spec: TensorSpec, part: int) -> list[Box]:
        """The boxes of a tensor of `spec` that tp rank `part` holds, in the order of its local memory."""
        dim = spec.tp_dim
        if dim is None:
            return [Box((0,) * len(spec.shape), spec.shape)]
        return [
            Box(
                tuple(start if at == dim else 0 for at in range(len(spec.shape))),
                tuple(end - start if at == dim else extent for at, extent in enumerate(spec.shape)),
            )
            for start, end in spec.intervals(self.config.tp, part)
        ]

    def owners(self, unit: Unit) -> list[tuple[Box, NDArray[np.int64]]]:
        """(box, the ranks that hold just this box) of a kind that is not sharded."""
        parts: dict[Box, list[int]] = {}
        for part in range(self.config.tp):
            for box in self.boxes(unit.spec, part):
                parts.setdefault(box, []).append(part)
        return [(box, self.ranks(unit.stages, of, unit.spec.expert)) for box, of in parts.items()]

    def manifest(self, rank: int) -> Manifest:
        """Everything that virtual rank `rank` holds."""
        at = self.config.coordinate(rank)
        experts, replica = self._experts_of(self.config.expert_part(rank)), self.config.replica(rank)
        mine = [
            (unit, box)
            for unit in self.units()
            if at.pp in unit.stages and (unit.spec.expert is None or unit.spec.expert in experts)
            for box in self.boxes(unit.spec, at.tp)
        ]
        shards: list[Shard] = []
        for kind in self.model.kinds:
            if not self.is_sharded(kind):
                shards += [Shard(self.logical(unit, kind), box) for unit, box in mine]
                continue
            dense = [entry for entry in mine if entry[0].spec.expert is None]
            sparse = [entry for entry in mine if entry[0].spec.expert is not None]
            ep = self.config.ep
            shards += self._flat_part(dense, kind, self.num_replicas, replica)
            shards += self._flat_part(sparse, kind, self.num_replicas // ep, replica // ep)
        return tuple(shards)

    def layout(self) -> Layout:
        """Every rank's manifest; for jobs of a size where that is sensible (up to a few hundred ranks)."""
        if self.model.zero1:
            return tuple(self.manifest(rank) for rank in range(self.config.num_ranks))
        known: dict[tuple[int, int, int], Manifest] = {}
        manifests = []
        for rank in range(self.config.num_ranks):
            at = self.config.coordinate(rank)
            key = (at.pp, at.tp, self.config.expert_part(rank))
            if key not in known:
                known[key] = self.manifest(rank)
            manifests.append(known[key])
        return tuple(manifests)

    @staticmethod
    def range_size(total: int, num_parts: int) -> int:
        """Elements of each of the equal ranges of a flat buffer of `total` elements, padding included (ZeRO-1)."""
        multiple = lcm(num_parts, _BUCKET_MULTIPLE)
        return -(-total // multiple) * multiple // num_parts

    def _experts_of(self, home: int) -> range:
        count = self.model.num_experts // self.config.ep
        return range(home * count, (home + 1) * count)

    def _flat_part(
        self, mine: Sequence[tuple[Unit, Box]], kind: StateKind, num_parts: int, index: int
    ) -> list[Shard]:
        """Part `index` of the flat buffer of all boxes of `mine`, padded to equal parts (ZeRO-1)."""
        size = self.range_size(sum(prod(box.shape) for _, box in mine), num_parts)
        start, end = size * index, size * (index + 1)
        shards, position = [], 0
        for unit, box in mine:
            length = box.num_elements
            low, high = max(start, position) - position, min(end, position + length) - position
            if low < high:
                tensor = self.logical(unit, kind)
                shards += [Shard(tensor, piece) for piece in flat_range(box, low, high)]
            position += length
        return shards
