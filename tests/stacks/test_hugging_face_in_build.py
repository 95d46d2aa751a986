"""What Hugging Face's libraries do in `build` and `activate`."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from etc_agent.adapters.native import Native
from etc_agent.errors import EtcError
from etc_agent.integrations.native import TrainState, shards_of
from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.context import ParallelContext
from etc_agent.worker.data.division import GlobalBatch
from etc_agent.worker.model import build_state
from etc_agent.worker.world.build import build_fake
from etc_agent.worker.world.swap import entered, install

pytestmark = pytest.mark.stacks

CPU = torch.device("cpu")


def layout_of(build: Callable[[ParallelContext], TrainState], config: ParallelConfig) -> dict[str, list[tuple]]:
    """Tensor -> dtype and box on each rank of `config`."""
    install()
    found: dict[str, list[tuple]] = {}
    for rank in range(config.num_ranks):
        with contextlib.closing(build_fake(rank, config, CPU)) as world:
            state = build_state(Native(build), world, CPU, 1, GlobalBatch(8))
            assert all(param.is_meta for param in state.model.parameters())
            with entered(world):
                for shard in shards_of(state):
                    box = shard.box
                    found.setdefault(shard.tensor.name, []).append((shard.tensor.dtype, box.offset, box.shape))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=True, dtype=torch.bfloat16,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_from_pretrained_in_build_makes_the_structure_with_transformers_own_plans(folder: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    def build(parallel: ParallelContext) -> TrainState:
        degrees = DistributedConfig(tp_size=parallel.config.tp, fsdp_size=parallel.config.dp)
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=degrees)
        return TrainState(model.train(), torch.optim.AdamW(model.parameters()))

    layout = layout_of(build, ParallelConfig(dp=2, tp=2))
    assert not any("lm_head" in name for name in layout), "the head is tied: one name"
    query = layout["model.model.layers.0.self_attn.q_proj.weight"]
    assert {offset for _, offset, _ in query} == {(0, 0), (8, 0), (16, 0), (24, 0)}
    assert {(dtype, shape) for dtype, _, shape in query} == {("bfloat16", (8, 32))}
    assert layout["model.model.rotary_emb.inv_freq"][0][0] == "float32"
    assert torch.get_default_dtype() == torch.float32


def test_a_copy_on_meta_keeps_ties_and_frozen_parameters(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    from etc_agent.hugging_face.twins import meta_twin

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.norm.weight.requires_grad_(False)
    twin = meta_twin(model)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert not twin.model.norm.weight.requires_grad
    assert all(tensor.is_meta for tensor in (*twin.parameters(), *twin.buffers()))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_an_accelerator_that_counts_other_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.state import PartialState

    from etc_agent.adapters.accelerate import check_generation, forget_earlier_generation

    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    forget_earlier_generation()
    check_generation()
    PartialState(cpu=True)
    with pytest.raises(EtcError, match=r"accelerate counts 1 process where the generation has 4.*cpu=True"):
        check_generation()
    forget_earlier_generation()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps; give global_batch alone"),
        ({"train_sampling_strategy": "group_by_length"}, "choose random or sequential"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_change_size_is_refused_by_the_trainer(option: dict, message: str, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from etc_agent.hugging_face import ElasticTrainer

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **option)
    with pytest.raises(EtcError, match=message):
        ElasticTrainer(model=torch.nn.Linear(2, 2), args=args, train_dataset=[{"x": 1}], global_batch=8)


@pytest.mark.parametrize("module", ["adapters.transformers", "adapters.accelerate", "hugging_face.trainer"])
def test_the_names_exist_that_are_used_beyond_the_documented_interface(module: str) -> None:
    for name in importlib.import_module(f"etc_agent.{module}").NAMES:
        parts = name.split(".")
        at = next(n for n in range(len(parts), 0, -1) if _is_module(".".join(parts[:n])))
        functools.reduce(getattr, parts[at:], importlib.import_module(".".join(parts[:at])))


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
