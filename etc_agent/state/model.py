"""A declarative description of a transformer's state: which logical tensors there are, and along what they are cut.

Nothing after this file knows what a layer is: a description and a parallel config give a layout
(`etc_agent.state.sharding`), and layouts are boxes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class StateKind:
    """One copy of every parameter's shape: the parameter itself, or one piece of its optimizer state.

    `sharded`: with ZeRO-1 this kind is split over the data-parallel replicas.
    """

    name: str
    dtype: str
    itemsize: int
    sharded: bool = True

    def __post_init__(self) -> None:
        if self.itemsize < 1:
            raise ValueError(f"kind {self.name}: itemsize must be at least 1 byte, not {self.itemsize}")

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read a mapping with the fields above. Raises ValueError where it is none."""
        if not isinstance(value, Mapping) or not {"name", "dtype", "itemsize"} <= set(value):
            raise ValueError(f"kinds: expected a list of mappings with name, dtype and itemsize, got {value!r}")
        return cls(**_checked(cls, value, "a kind of state"))


def _checked(cls: type[Any], value: Mapping[str, Any], what: str) -> dict[str, Any]:
    """`value`, whose keys are fields of the dataclass `cls`; plain fields have the type that they are declared with."""
    known = {field.name: str(field.type) for field in fields(cls)}
    unknown = [name for name in value if name not in known]
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r} in {what}; known are {', '.join(known)}")
    types = {"str": str, "int": int, "bool": bool}
    for name, entry in value.items():
        wanted = types.get(known[name])
        if wanted is not None and type(entry) is not wanted:
            raise ValueError(f"{name}: expected {wanted.__name__}, got {entry!r}")
    return dict(value)


BF16_ADAM = (
    StateKind("model", "bfloat16", 2, sharded=False),
    StateKind("optimizer.master", "float32", 4),
    StateKind("optimizer.exp_avg", "float32", 4),
    StateKind("optimizer.exp_avg_sq", "float32", 4),
)
"""Mixed precision Adam as in Megatron: 14 bytes per parameter."""


@dataclass(frozen=True, slots=True)
class Block:
    """A run of `num_units` units of `unit` elements along the dim that tp cuts.

    Parts are ceil(num_units / tp) units, rounded up to `multiple` (padding; what lies beyond the run does not exist,
    so that late parts may be shorter or empty). `replicated`: with more parts than units each unit goes to
    tp / num_units neighbours (kv heads) instead of leaving parts empty.
    """

    num_units: int
    unit: int = 1
    multiple: int = 1
    replicated: bool = False

    @property
    def size(self) -> int:
        return self.num_units * self.unit

    def part(self, tp: int, index: int) -> tuple[int, int]:
        """[start, end) in elements of the block that part `index` of `tp` holds."""
        if self.replicated and tp > self.num_units:
            at = index * self.num_units // tp
            return at * self.unit, (at + 1) * self.unit
        step = -(-self.num_units // tp)
        step = -(-step // self.multiple) * self.multiple
        start, end = min(step * index, self.num_units), min(step * (index + 1), self.num_units)
        return start * self.unit, end * self.unit


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A logical parameter. `tp_dim`: the dim that tp cuts, made of `blocks` cut one by one; None for replicated.

    `expert`: the expert that it belongs to, or None.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    blocks: tuple[Block, ...] = ()
    expert: int | None = None

    def intervals(self, tp: int, index: int) -> list[tuple[int, int]]:
        """The non-empty [start, end) along `tp_dim` that tp rank `index` holds; neighbouring blocks are joined."""
        found: list[tuple[int, int]] = []
        start = 0
        for block in self.blocks:
            low, high = block.part(tp, index)
            if found and found[-1][1] == start + low and high > low:
                found[-1] = (found[-1][0], start + high)
            elif high > low:
                found.append((start + low, start + high))
            start += block.size
        return found


def _split(name: str, shape: tuple[int, ...], dim: int, *blocks: Block, expert: int | None = None) -> TensorSpec:
    return TensorSpec(name, shape, dim, blocks or (Block(shape[dim]),), expert)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A GPT- or Llama-like model and its optimizer.

    `positions`: learned position embeddings, 0 for rotary ones. `vocab_multiple`: the vocabulary is padded to
    this many rows per tp rank. `tied`: the output head is the word embedding; with more than one stage the last one
    holds a second copy. `norm`: ``rms``, ``layer`` (with bias) or ``none``. `gated`: gate and up projections, fused.
    `num_experts`: 0 for a dense feed-forward part. `zero1`: optimizer state is split over data-parallel replicas.

    Raises:
        ValueError: a size is not positive, or sizes contradict each other.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    vocab: int
    ffn_hidden: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    sequence: int = 2048
    positions: int = 0
    vocab_multiple: int = 128
    tied: bool = False
    norm: str = "rms"
    bias: bool = False
    gated: bool = False
    num_experts: int = 0
    experts_per_token: int = 2
    zero1: bool = False
    kinds: tuple[StateKind, ...] = BF16_ADAM

    def __post_init__(self) -> None:
        for field in ("num_layers", "hidden", "num_heads", "vocab", "sequence", "vocab_multiple", "experts_per_token"):
            if getattr(self, field) < 1:
                raise ValueError(f"{self.name}: {field} must be at least 1, not {getattr(self, field)}")
        for field in ("ffn_hidden", "num_kv_heads", "head_dim", "positions", "num_experts"):
            if getattr(self, field) < 0:
                raise ValueError(f"{self.name}: {field} must be at least 1, or 0 for none, not {getattr(self, field)}")
        if not self.kinds or len({kind.name for kind in self.kinds}) < len(self.kinds):
            raise ValueError(f"{self.name}: kinds need at least one entry, and a name of its own for each")
        if self.norm not in ("rms", "layer", "none"):
            raise ValueError(f"{self.name}: norm is 'rms', 'layer' or 'none', not {self.norm!r}")
        if not self.head_dim and self.hidden % self.num_heads:
            raise ValueError(f"{self.name}: hidden {self.hidden} is not divisible by {self.num_heads} heads")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"{self.name}: {self.num_heads} heads are not divisible by {self.kv_heads} kv heads")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read a mapping with the fields above; `kinds` as a list of mappings.

        Raises:
            ValueError: a field is unknown, missing or of the wrong type.
        """
        given = _checked(cls, value, "a model description")
        if "kinds" in given:
            kinds = given["kinds"]
            given["kinds"] = tuple(map(StateKind.from_json, kinds if isinstance(kinds, list) else [kinds]))
        missing = [field.name for field in fields(cls) if field.default is MISSING and field.name not in given]
        if missing:
            raise ValueError(f"a model description needs {', '.join(missing)}")
        return cls(**given)

    # ---- derived sizes --------------------------------------------------------------------------------------------

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def ffn(self) -> int:
        return self.ffn_hidden or 4 * self.hidden

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.num_heads

    @property
    def bytes_per_parameter(self) -> int:
        return sum(kind.itemsize for kind in self.kinds)

    # ---- tensors --------------------------------------------------------------------------------------------------

    def embedding_specs(self) -> list[TensorSpec]:
        """On the first stage; of these, the word embedding is on the last one too when tied."""
        specs = [self._vocab("embedding.word")]
        if self.positions:
            specs.append(TensorSpec("embedding.position", (self.positions, self.hidden)))
        return specs

    def head_specs(self) -> list[TensorSpec]:
        """On the last stage."""
        return [*self._norm("final_norm"), *([] if self.tied else [self._vocab("head")])]

    def layer_specs(self) -> list[TensorSpec]:
        """Of every layer."""
        hidden, width = self.hidden, self.head_size
        query = Block(self.num_heads, width)
        kv = Block(self.kv_heads, width, replicated=True)
        rows = query.size + 2 * kv.size
        specs = [
            *self._norm("attention_norm"),
            _split("attention.qkv", (rows, hidden), 0, query, kv, kv),
            *([_split("attention.qkv_bias", (rows,), 0, query, kv, kv)] if self.bias else []),
            _split("attention.out", (hidden, query.size), 1, query),
            *([TensorSpec("attention.out_bias", (hidden,))] if self.bias else []),
            *self._norm("mlp_norm"),
        ]
        if not self.num_experts:
            return specs + self._mlp("mlp", None)
        specs.append(TensorSpec("mlp.router", (self.num_experts, hidden)))
        for expert in range(self.num_experts):
            specs += self._mlp(f"mlp.experts.{expert}", expert)
        return specs

    def _vocab(self, name: str) -> TensorSpec:
        return _split(name, (self.vocab, self.hidden), 0, Block(self.vocab, multiple=self.vocab_multiple))

    def _norm(self, name: str) -> list[TensorSpec]:
        parts = {"rms": ["weight"], "layer": ["weight", "bias"], "none": []}[self.norm]
        return [TensorSpec(f"{name}.{part}", (self.hidden,)) for part in parts]

    def _mlp(self, name: str, expert: int | None) -> list[TensorSpec]:
        hidden, ffn = self.hidden, self.ffn
        up = [Block(ffn)] * (2 if self.gated else 1)
        rows = ffn * len(up)
        specs = [_split(f"{name}.up", (rows, hidden), 0, *up, expert=expert)]
        if self.bias:
            specs.append(_split(f"{name}.up_bias", (rows,), 0, *up, expert=expert))
        specs.append(_split(f"{name}.down", (hidden, ffn), 1, expert=expert))
        if self.bias:
            specs.append(TensorSpec(f"{name}.down_bias", (hidden,), expert=expert))
        return specs
