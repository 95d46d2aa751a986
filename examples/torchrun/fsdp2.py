"""A small transformer with FSDP2: mixed precision, hybrid sharding, and tensor parallelism with sequence parallelism.

torchrun --nproc-per-node 4 examples/torchrun/fsdp2.py --tp 2
"""

from __future__ import annotations

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler

WORDS, LENGTH, WIDTH, HEADS, LAYERS = 64, 16, 64, 4, 3


class Sentences(torch.utils.data.Dataset):
    """Words that follow one another by a rule, with some noise."""

    def __len__(self) -> int:
        return 1920

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.Generator().manual_seed(index)
        words = [int(torch.randint(WORDS, (), generator=noise))]
        for jump in torch.randint(3, (LENGTH,), generator=noise).tolist():
            words.append((5 * words[-1] + jump) % WORDS)
        return torch.tensor(words)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.before_mlp, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism along `mesh`."""
    parallelize_module(model, mesh, {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    })
    for block in model.blocks:
        parallelize_module(block, mesh, {
            "before_attention": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "before_mlp": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        })


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=48, help="sentences per step, over all ranks")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1, help="copies of the sharded state, if ranks suffice")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--compute-dtype", default="bfloat16")
    parser.add_argument("--reduce-dtype", default="float32")
    parser.add_argument("--keep-unsharded", action="store_true", help="from the forward to the backward pass")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", default="", help="folder for the weights")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dtype, compute, reduce = (getattr(torch, name) for name in (args.dtype, args.compute_dtype, args.reduce_dtype))
    torch.set_default_dtype(dtype)
    torch.manual_seed(args.seed)

    tp = args.tp
    if dist.get_world_size() % tp:
        raise ValueError(f"{dist.get_world_size()} ranks cannot be divided by tp={tp}")
    num_parts = dist.get_world_size() // tp
    replicas = math.gcd(args.replicas, num_parts)
    shape = (replicas, num_parts // replicas, tp)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    model = Transformer().to(device)
    if tp > 1:
        parallelize(model, mesh["tp"])
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    dp_mesh = mesh["dp_replicate", "dp_shard"] if replicas > 1 else mesh["dp_shard"]
    for block in model.blocks:
        fully_shard(block, mesh=dp_mesh, mp_policy=precision, reshard_after_forward=not args.keep_unsharded)
    fully_shard(model, mesh=dp_mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=50)

    data, whole = Sentences(), StateDictOptions(full_state_dict=True, cpu_offload=True)
    sampler = DistributedSampler(data, num_parts, dist.get_rank() // tp, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch // num_parts, sampler=sampler)
    step = epoch = 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        for words in loader:
            words = words.to(device)
            outputs = model(words[:, :-1])
            loss = functional.cross_entropy(outputs.flatten(0, 1).to(dtype), words[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"step {step} loss {total.item() / dist.get_world_size():.12f}", flush=True)
            if args.save and (step + 1) % args.save_every == 0:
                weights = get_model_state_dict(model, options=whole)
                if dist.get_rank() == 0:
                    torch.save(weights, f"{args.save}/{step + 1}.pt")
            step += 1
            if step == args.steps:
                break
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
