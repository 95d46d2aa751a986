"""A byte-level GPT in the manner of nanoGPT: random windows of a memory-mapped file of tokens, DistributedDataParallel,
gradient accumulation, a learning rate set by hand, an evaluation now and then.

torchrun --nproc-per-node 2 examples/torchrun/nanogpt.py
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP


def token_file(path: Path) -> np.memmap:
    """The sources of Python's library as tokens of two bytes, written by the first process that needs them."""
    if not path.exists():
        text = b"".join(source.read_bytes() for source in sorted(Path(os.__file__).parent.glob("*.py")))
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
            part.write(np.frombuffer(text[:4_000_000], np.uint8).astype(np.uint16).tobytes())
        Path(part.name).replace(path)
    return np.memmap(path, np.uint16, "r")


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, block: int, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.apply(self._initialise)
        self.head.weight = self.tokens.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=24, help="windows per step, over all ranks")
    parser.add_argument("--micro-batch", type=int, default=2, help="windows per forward pass of a rank")
    parser.add_argument("--block", type=int, default=64, help="tokens per window")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "nanogpt.bin")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--bf16", action="store_true", help="autocast")
    parser.add_argument("--eval-every", type=int, default=50, help="steps")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--save", default="", help="folder for the weights")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_default_dtype(getattr(torch, args.dtype))
    torch.manual_seed(args.seed)
    data = token_file(args.data)
    splits = {"train": data[: len(data) * 9 // 10], "val": data[len(data) * 9 // 10 :]}

    def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
        high = len(splits[split]) - args.block
        starts = torch.randint(high, (args.micro_batch,))
        windows = np.stack([splits[split][start : start + args.block + 1] for start in starts.tolist()])
        tokens = torch.from_numpy(windows.astype(np.int64)).to(device)
        return tokens[:, :-1], tokens[:, 1:]

    def learning_rate(step: int) -> float:
        warm = min(1.0, (step + 1) / 20)
        return args.lr * warm * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / args.steps)))

    @torch.no_grad()
    def evaluate(model: nn.Module) -> float:
        model.eval()
        losses = [model(*get_batch("val")).item() for _ in range(4)]
        model.train()
        return sum(losses) / len(losses)

    model = GPT(args.block, width=64, heads=4, layers=2, dropout=args.dropout).to(device)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    model = DDP(model)

    torch.manual_seed(args.seed + dist.get_rank())
    accumulate = args.batch // args.micro_batch // dist.get_world_size()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        total = torch.zeros((), device=device)
        for micro_step in range(accumulate):
            model.require_backward_grad_sync = micro_step == accumulate - 1
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                loss = model(*get_batch("train")) / accumulate
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if dist.get_rank() == 0:
            print(f"step {step} loss {total.item() / dist.get_world_size():.12f}", flush=True)
            if step % args.eval_every == 0:
                print(f"validation {evaluate(model.module):.4f}", flush=True)
            if args.save and (step + 1) % args.save_every == 0:
                torch.save(model.module.state_dict(), f"{args.save}/{step + 1}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
