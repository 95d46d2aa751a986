"""Tensors that are cut by hand: what a layout says of them is what moves, and their optimizer's state with them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import etc_agent as etc
from etc_agent.errors import EtcError
from etc_agent.integrations.layouts import Piece, cut, flat_range
from etc_agent.integrations.native import (
    TrainState,
    create_optimizer_state,
    materialise,
    shards_of,
    start_values,
    whole_model,
)
from etc_agent.state.boxes import Box, whole
from etc_agent.state.check import check_layout
from etc_agent.state.layout import Shard

CPU = torch.device("cpu")


class Fused(nn.Module):
    """A projection of which this rank has its part of every block, one after the other."""

    def __init__(self, blocks: Sequence[int], width: int, part: int, num_parts: int, dim: int) -> None:
        super().__init__()
        size = sum(blocks) // num_parts
        self.weight = nn.Parameter(torch.empty((size, width) if dim == 0 else (width, size)))
        self.norm = nn.Parameter(torch.empty(width))


def fused_state(blocks: Sequence[int], width: int, part: int, num_parts: int, dim: int) -> TrainState:
    shape = (sum(blocks), width) if dim == 0 else (width, sum(blocks))

    def layout(name: str, tensor: torch.Tensor) -> list[Piece] | None:
        return cut(shape, dim, part, num_parts, blocks) if name == "weight" else None

    with torch.device("meta"):
        model = Fused(blocks, width, part, num_parts, dim)
        optimizer = torch.optim.AdamW(model.parameters())
    state = TrainState(model, optimizer, layout=layout)
    create_optimizer_state(state)
    return state


def filled(state: TrainState) -> dict[Shard, torch.Tensor]:
    materialise(state, lambda placed, meta: torch.zeros(meta.shape, dtype=meta.dtype))
    return shards_of(state)


def whole_of(shards: Sequence[dict[Shard, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The logical tensors, put together from all ranks."""
    wholes: dict[str, torch.Tensor] = {}
    for held in shards:
        for shard, view in held.items():
            tensor = wholes.setdefault(shard.tensor.name, torch.full(shard.tensor.shape, torch.nan))
            tensor[tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.shape, strict=True))] = view
    return wholes


@st.composite
def fused_cases(draw: st.DrawFn) -> tuple[list[int], int, int, int, int]:
    before, after = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 3, 4]))
    blocks = draw(st.lists(st.sampled_from([12, 24, 36]), min_size=1, max_size=4))
    return blocks, draw(st.integers(1, 3)), before, after, draw(st.sampled_from([0, 1]))


@settings(deadline=None, max_examples=40)
@given(fused_cases())
def test_any_fused_tensor_keeps_its_values_and_its_moments_when_it_is_cut_in_another_way(
    case: tuple[list[int], int, int, int, int],
) -> None:
    blocks, width, before, after, dim = case
    old = [filled(fused_state(blocks, width, part, before, dim)) for part in range(before)]
    new = [filled(fused_state(blocks, width, part, after, dim)) for part in range(after)]
    check_layout(tuple(tuple(held) for held in old))
    check_layout(tuple(tuple(held) for held in new))
    shape = (sum(blocks), width) if dim == 0 else (width, sum(blocks))
    names = ("model.weight", "optimizer.weight.exp_avg", "optimizer.weight.exp_avg_sq")
    wanted = {name: torch.randn(shape) for name in names}
    for held in old:
        for shard, view in held.items():
            if shard.tensor.name in wanted:
                view.copy_(wanted[shard.tensor.name][shard.box.within(wholes_box(shape))])
    # What a hand-written tensor-parallel layer has in its memory: its part of each block.
    for part, held in enumerate(old):
        local = next(view for shard, view in held.items() if shard.tensor.name == "model.weight")
        memory = torch.empty(0).set_(local.untyped_storage(), 0, local_shape(shape, dim, before))
        parts = [block.chunk(before, dim)[part] for block in wanted["model.weight"].split(blocks, dim)]
        assert torch.equal(memory, torch.cat(parts, dim))
    gathered = whole_of(old)
    for held in new:
        for shard, view in held.items():
            view.copy_(gathered[shard.tensor.name][shard.box.within(wholes_box(shard.tensor.shape))]
                       if shard.tensor.shape else gathered[shard.tensor.name])
    again = whole_of(new)
    assert all(torch.equal(again[name], wanted[name]) for name in names)


def wholes_box(shape: Sequence[int]) -> Box:
    return whole(tuple(shape))


def local_shape(shape: tuple[int, int], dim: int, num_parts: int) -> tuple[int, int]:
    return (shape[0] // num_parts, shape[1]) if dim == 0 else (shape[0], shape[1] // num_parts)


@given(st.integers(0, 24), st.integers(0, 24), st.integers(0, 3))
def test_a_flat_range_is_the_elements_that_it_says_in_their_order(one: int, other: int, at: int) -> None:
    start, end = sorted((one, other))
    numbers, local = torch.arange(24.0).view(4, 3, 2), torch.zeros(at + end - start)
    for piece in flat_range((4, 3, 2), start, end, at):
        piece.check("flat", local)
        piece.view(local).copy_(numbers[piece.box.within(wholes_box((4, 3, 2)))])
    assert torch.equal(local[at:], torch.arange(24.0)[start:end])


def test_one_local_tensor_holds_several_logical_ones_and_its_step_count_is_that_of_each() -> None:
    def layout(name: str, tensor: torch.Tensor) -> list[Piece]:
        return [*flat_range((2, 3), 2, 6, name="first"), *flat_range((5,), 0, 3, at=4, name="second")]

    with torch.device("meta"):
        model = nn.Module()
        model.flat = nn.Parameter(torch.empty(8))
        state = TrainState(model, torch.optim.AdamW(model.parameters()), layout=layout)
    create_optimizer_state(state)
    names = {shard.tensor.name for shard in filled(state)}
    kinds = ("exp_avg", "exp_avg_sq", "step")
    assert names == {f"model.{each}" for each in ("first", "second")} | {
        f"optimizer.{each}.{kind}" for each in ("first", "second") for kind in kinds
    }


def test_what_no_piece_covers_has_no_value_and_init_need_not_write_it() -> None:
    def init(state: TrainState) -> None:
        for shard, view in shards_of(state).items():
            if shard.tensor.name.startswith("model."):
                view.fill_(1.0)

    def layout(name: str, tensor: torch.Tensor) -> list[Piece]:
        return flat_range((2, 3), 0, 6)

    with torch.device("meta"):
        model = nn.Module()
        model.flat = nn.Parameter(torch.empty(8))
    state = TrainState(model, None, layout=layout, init=init)
    start_values(state, CPU, None)
    assert model.flat.tolist() == [1.0] * 6 + [0.0] * 2


def test_the_constructors_values_of_the_whole_model_come_in_by_boxes() -> None:
    blocks = (4, 4, 4)
    source = fused_state(blocks, 2, 0, 1, 0)
    materialise(source, lambda placed, meta: torch.randn(meta.shape).to(meta.dtype))
    values = source.model.weight.detach().clone()
    for part in range(2):
        state = fused_state(blocks, 2, part, 2, 0)
        state.init = "module"
        start_values(state, CPU, whole_model(source))
        assert torch.equal(
            state.model.weight.detach(), torch.cat([block.chunk(2)[part] for block in values.split(blocks)])
        )


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([Piece((4, 2), (3, 0), (2, 2), (0, 0))], "has to lie inside"),
        ([Piece((4, 2), (0, 0), (2, 2), (3, 0))], "has to lie inside"),
        ([Piece((8, 2), (0, 0), (4, 2), (0, 0)), Piece((8, 2), (4, 0), (1, 2), (3, 0))], "overlap"),
        (["rows"], "expected etc_agent.Piece"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_the_tensors_name(pieces: list, said: str) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(4, 2))
    with pytest.raises(EtcError, match=said) as refused:
        shards_of(TrainState(model, None, layout=lambda name, tensor: pieces))
    assert "weight" in str(refused.value)


def test_state_that_has_neither_the_parameters_shape_nor_none_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = Fused((4, 4), 4, 0, 2, 0)
        optimizer = torch.optim.Adafactor([model.weight])
    state = TrainState(model, optimizer, layout=lambda name, tensor: cut((8, 4), 0, 0, 2) if name == "weight" else None)
    create_optimizer_state(state)
    with pytest.raises(EtcError, match=r"optimizer\.weight\.row_var"):
        shards_of(state)


def test_blocks_that_do_not_make_up_the_dim_are_refused() -> None:
    with pytest.raises(ValueError, match="add up to 12"):
        etc.cut((12, 2), 0, 0, 2, (4, 4))
