"""A small image classifier with DistributedDataParallel, batch norm, gradient accumulation and bf16 autocast.

torchrun --nproc-per-node 2 examples/torchrun/ddp.py
"""

from __future__ import annotations

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

CLASSES, SIDE = 10, 16


class Pictures(torch.utils.data.Dataset):
    """Noisy gratings: the class is their direction."""

    def __len__(self) -> int:
        return 1920

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.Generator().manual_seed(index)
        label = int(torch.randint(CLASSES, (), generator=noise))
        angle = torch.tensor(torch.pi * label / CLASSES)
        x, y = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
        grating = torch.sin(x * angle.cos() + y * angle.sin() + torch.rand((), generator=noise) * 6)
        return grating.expand(3, -1, -1) + 0.5 * torch.randn(3, SIDE, SIDE, generator=noise), label


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


def network() -> nn.Module:
    return nn.Sequential(
        Block(3, 32), Block(32, 64), Block(64, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=48, help="pictures per step, over all ranks")
    parser.add_argument("--micro-batch", type=int, default=4, help="pictures per forward pass of a rank")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--bf16", action="store_true", help="autocast")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", default="", help="folder for the weights")
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_default_dtype(getattr(torch, args.dtype))
    torch.manual_seed(args.seed)

    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    model = DDP(model)

    data = Pictures()
    sampler = DistributedSampler(data, seed=args.seed, drop_last=True)
    loader = DataLoader(data, batch_size=args.micro_batch, sampler=sampler, num_workers=2, drop_last=True)
    accumulate = args.batch // args.micro_batch // dist.get_world_size()
    step = epoch = 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for i, (pictures, labels) in enumerate(loader, 1):
            is_last = i % accumulate == 0
            with contextlib.nullcontext() if is_last else model.no_sync():
                with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                    outputs = model(pictures.to(device))
                loss = nn.functional.cross_entropy(outputs.to(total.dtype), labels.to(device)) / accumulate
                loss.backward()
            total += loss.detach()
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                dist.all_reduce(total)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if dist.get_rank() == 0:
                    print(f"step {step} loss {total.item() / dist.get_world_size():.12f}", flush=True)
                    if args.save and (step + 1) % args.save_every == 0:
                        torch.save(model.module.state_dict(), f"{args.save}/{step + 1}.pt")
                total.zero_()
                step += 1
                if step == args.steps:
                    break
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
