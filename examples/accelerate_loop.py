"""torchrun/accelerate_loop.py, elastic.

etc-run --standalone --nproc-per-node 4 examples/accelerate_loop.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils import data

import etc_agent as etc

CLASSES, VOCABULARY, LENGTH, WIDTH = 5, 64, 24, 48


class Sentences(data.Dataset):
    """Random words; the class is the most frequent of the first few."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return words, (words % CLASSES).bincount(minlength=CLASSES).argmax()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.words(words)).mean(1))


def accelerate(args: argparse.Namespace, *objects: Any) -> list[Any]:
    """An accelerator, and `objects` as it prepares them."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=args.mixed_precision)
    accelerator.gradient_accumulation_steps = args.batch // args.micro_batch // accelerator.num_processes
    return [accelerator, *(accelerator.prepare(each) for each in objects)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=48, help="sentences per step, over all ranks")
    parser.add_argument("--micro-batch", type=int, default=4, help="sentences per forward pass of a rank")
    parser.add_argument("--mixed-precision", default="no", choices=("no", "bf16"))
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", default="", help="folder for the weights")
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)

    def build(parallel: etc.ParallelContext) -> etc.TrainState:
        model = Classifier().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
        return etc.TrainState(model, optimizer, scheduler, init="module", activate=lambda _: accelerate(args, model))

    with etc.session(build, global_batch=args.batch, seed=args.seed) as session:
        loader = session.loader(Sentences(), batch_size=args.micro_batch)
        for step in session.steps(args.steps):
            with step:
                accelerator, model = session.model
                losses = []
                for words, labels in loader:
                    with accelerator.accumulate(model):
                        loss = nn.functional.cross_entropy(model(words), labels)
                        accelerator.backward(loss)
                        if accelerator.sync_gradients:
                            accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    losses.append(loss.detach())
                step.commit()
                mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
                if args.save and (step + 1) % args.save_every == 0:
                    accelerator.save(accelerator.get_state_dict(model), f"{args.save}/{step + 1}.pt")
                accelerator.print(f"step {step} loss {mean.item():.12f}", flush=True)


if __name__ == "__main__":
    main()
