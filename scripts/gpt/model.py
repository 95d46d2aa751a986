"""A GPT over bytes, or one pipeline stage of it. Names are those of the whole model on every stage."""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from etc_agent.integrations.native import TrainState, shards_of
from gpt.options import VOCABULARY, GptOptions
from gpt.tensor_parallel import (
    ColumnLinear,
    GatheredLinear,
    RowLinear,
    ShardParameters,
    VocabEmbedding,
    column_input,
)


def stage_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """The layers of pipeline stage `stage`: the same number each, the first ones one more where it does not divide."""
    share, rest = divmod(num_layers, num_stages)
    first = stage * share + min(stage, rest)
    return range(first, first + share + (stage < rest))


class Rotary(nn.Module):
    """Rotary position embedding over the last dim of (batch, heads, sequence, width), pairing its two halves."""

    inverse_frequency: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("inverse_frequency", torch.empty(width // 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
        angles = torch.outer(positions, self.inverse_frequency)
        sin, cos = angles.sin(), angles.cos()
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    """One transformer layer, normalised before attention and before the MLP: (batch, sequence, hidden) -> the same."""

    def __init__(self, options: GptOptions) -> None:
        super().__init__()
        self._head_width = options.hidden // options.heads
        self._dropout = options.dropout
        self.attention_norm = nn.LayerNorm(options.hidden)
        self.query = ColumnLinear(options.hidden, options.hidden)
        self.key = ColumnLinear(options.hidden, options.hidden)
        self.value = ColumnLinear(options.hidden, options.hidden)
        self.out = RowLinear(options.hidden, options.hidden)
        self.mlp_norm = nn.LayerNorm(options.hidden)
        self.up = ColumnLinear(options.hidden, 4 * options.hidden)
        self.down = RowLinear(4 * options.hidden, options.hidden)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        h = column_input(self.attention_norm(x), self.query, self.key, self.value)
        query, key, value = (self._by_head(layer(h)) for layer in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(rotary(query), rotary(key), value, is_causal=True)
        x = x + self._dropped(self.out(attended.transpose(1, 2).flatten(2)))
        h = column_input(self.mlp_norm(x), self.up)
        return x + self._dropped(self.down(F.gelu(self.up(h))))

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self._head_width)).transpose(1, 2)

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self._dropout, self.training) if self._dropout else x


class Gpt(nn.Module):
    """Stage `stage` of `num_stages`. The first takes bytes (batch, sequence) int64, the last gives logits."""

    def __init__(self, options: GptOptions, num_stages: int, stage: int) -> None:
        super().__init__()
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        if self.is_first:
            self.embedding = VocabEmbedding(VOCABULARY, options.hidden)
        self.rotary = Rotary(options.hidden // options.heads)
        layers = stage_layers(options.layers, num_stages, stage)
        self.layers = nn.ModuleDict({str(index): Block(options) for index in layers})
        if self.is_last:
            self.norm = nn.LayerNorm(options.hidden)
            self.head = GatheredLinear(options.hidden, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, self.rotary)
        return self.head(self.norm(x)) if self.is_last else x


def tensor_parallel(model: Gpt, mesh: DeviceMesh) -> None:
    """Shard `model` over the tp mesh. Norms and the biases after a row-wise product stay whole on every rank."""
    column = ShardParameters(weight=Shard(0), bias=Shard(0))
    row = ShardParameters(weight=Shard(1))
    plan = {"layers.*.query": column, "layers.*.key": column, "layers.*.value": column, "layers.*.out": row}
    plan |= {"layers.*.up": column, "layers.*.down": row}
    if model.is_first:
        plan["embedding"] = ShardParameters(weight=Shard(0))
    if model.is_last:
        plan["head"] = ShardParameters(weight=Shard(0))
    parallelize_module(model, mesh, plan)


def initialise_weights(state: TrainState, options: GptOptions) -> None:
    """Fill parameters and buffers by (seed, name, global index) alone: the same logical state in every config."""
    residual_scale = (2 * options.layers) ** -0.5
    for shard, local in shards_of(state).items():
        name, shape = shard.tensor.name, shard.tensor.shape
        if name == "model.rotary.inverse_frequency":
            whole = 10000.0 ** -(torch.arange(shape[0], dtype=torch.float32) / shape[0])
        elif not name.startswith("model."):
            continue
        elif name.endswith("norm.weight"):
            whole = torch.ones(shape)
        elif name.endswith("bias"):
            whole = torch.zeros(shape)
        else:
            digest = hashlib.sha256(f"{options.seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            scale = residual_scale if name.endswith((".out.weight", ".down.weight")) else 1.0
            whole = torch.randn(shape, generator=generator) * (0.02 * scale)
        cut = tuple(slice(start, start + size) for start, size in zip(shard.box.offset, shard.box.shape, strict=True))
        local.copy_(whole[cut])
