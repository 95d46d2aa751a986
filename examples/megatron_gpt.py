"""A GPT of Megatron-Core, made elastic: the same as examples/torchrun/megatron_gpt.py but for the lines that say etc.

etc-run --standalone --nproc-per-node 4 --parallel PP2TP2DP1 examples/megatron_gpt.py
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_on_cpu  # noqa: F401  (does nothing where there is a GPU)
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

import etc_agent as etc
from etc_agent.adapters.megatron import Megatron

VOCABULARY, PADDED, LENGTH, MICRO_BATCH = 130, 256, 32, 2


class Text(torch.utils.data.Dataset):
    """Tokens that follow each other by a rule, with some noise."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.Generator().manual_seed(index % len(self))
        first, stride = torch.randint(1, VOCABULARY, (2,), generator=noise)
        tokens = (first + stride % 7 * torch.arange(LENGTH + 1)) % VOCABULARY
        keep = torch.rand(LENGTH + 1, generator=noise) < 0.9
        return torch.where(keep, tokens, torch.randint(VOCABULARY, (LENGTH + 1,), generator=noise))


def build(args: argparse.Namespace) -> etc.TrainState:
    model_parallel_cuda_manual_seed(args.seed)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=args.layers, hidden_size=64, ffn_hidden_size=96, num_attention_heads=8, num_query_groups=4,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        normalization="RMSNorm", hidden_dropout=args.dropout, attention_dropout=args.dropout,
        use_cpu_initialization=True, params_dtype=dtype, pipeline_dtype=dtype, bf16=args.bf16,
        gradient_accumulation_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False,
        masked_softmax_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
    )
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), PADDED, LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untied, position_embedding_type="rope",
    )
    if args.bf16:
        model = Float16Module(config, model)
    distributed = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=args.distributed_optimizer
    )
    model = DistributedDataParallel(config, distributed, model)
    config.finalize_model_grads_func = finalize_model_grads
    adam = OptimizerConfig(
        optimizer="adam", lr=args.lr, min_lr=args.lr / 10, weight_decay=0.01, clip_grad=1.0, bf16=args.bf16,
        params_dtype=dtype, use_distributed_optimizer=args.distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(adam, [model])
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=args.lr, min_lr=args.lr / 10,
        lr_warmup_steps=min(8, args.steps // 2) * args.batch, lr_decay_steps=args.steps * args.batch,
        lr_decay_style="cosine", start_wd=0.01, end_wd=0.01, wd_incr_steps=1, wd_incr_style="constant",
    )
    return etc.TrainState(model, optimizer, scheduler)


def forward_step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches).to(torch.cuda.current_device())
    tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    positions = torch.arange(LENGTH, device=tokens.device).expand_as(tokens)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)
    return model(tokens, positions, mask, labels=labels), mean_loss


def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}  # Megatron divides the first by the number of microbatches


def print_loss(step: int, reported: list[dict[str, torch.Tensor]]) -> None:
    """The last stage knows the loss; rank 0 prints the mean over data parallelism."""
    total = torch.zeros(2, device=torch.cuda.current_device())
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
        total += torch.stack([torch.stack([each["loss"] for each in reported]).mean(), torch.ones(())])
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"step {step} loss {(total[0] / total[1]).item():.9f}", flush=True)


def save(model: Any, folder: Path, step: int) -> None:
    """Rank 0 writes the whole weights by name."""
    module = model.module.module if isinstance(model.module, Float16Module) else model.module
    pieces = []
    for value in nested_values(module.sharded_state_dict()):
        if isinstance(value, ShardedTensorFactory):
            pieces += list(nested_values(value.build_fn(value.key, value.data, value.replica_id, None)))
        elif isinstance(value, ShardedTensor):
            pieces.append(value)
    mine = [(each.key, each.global_shape, each.global_offset, each.local_shape, each.data.detach()) for each in pieces]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    whole: dict[str, torch.Tensor] = {}
    for key, shape, offset, extent, data in (piece for of_rank in gathered for piece in of_rank):
        num_leading = len(shape) - len(extent)
        place = (*offset[:num_leading], *(slice(o, o + e) for o, e in zip(offset[num_leading:], extent, strict=True)))
        whole.setdefault(key, torch.zeros(shape, dtype=data.dtype))[place] = data.cpu()
    if dist.get_rank() == 0:
        torch.save(whole, folder / f"{step}.pt")
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, over all ranks")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--untied", action="store_true", help="an output layer of its own")
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", default="", help="folder for the weights")
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    args = parser.parse_args()

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    data = Text()
    with etc.session(Megatron(lambda parallel: build(args)), global_batch=args.batch, seed=args.seed) as session:
        for step in session.steps(args.steps):
            with step:
                model = session.state.model
                batch = session.batch(data)
                reported = get_forward_backward_func()(
                    forward_step_func=forward_step, data_iterator=iter(batch.split(MICRO_BATCH)), model=[model],
                    num_microbatches=len(batch) // MICRO_BATCH, seq_length=LENGTH, micro_batch_size=MICRO_BATCH,
                    forward_only=False,
                )
                step.commit()
                print_loss(step, reported)
                if args.save and (step + 1) % args.save_every == 0:
                    save(model, Path(args.save), step + 1)


if __name__ == "__main__":
    main()
