"""torchrun/moe.py, elastic: dp and ep change while it trains.

etc-run --standalone --nproc-per-node 4 --parallel DP4EP2 examples/moe.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import etc_agent as etc

WORDS, LENGTH, WIDTH, EXPERTS = 64, 16, 32, 4


class Sentences:
    """Sample i, for any i: words that follow one another by a rule, with some noise."""

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.Generator().manual_seed(index)
        words = [int(torch.randint(WORDS, (), generator=noise))]
        for jump in torch.randint(3, (LENGTH,), generator=noise).tolist():
            words.append((5 * words[-1] + jump) % WORDS)
        return torch.tensor(words)


class Experts(nn.Module):
    """This rank's part of the experts, and the way of tokens to the others'."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.up = self.divided(torch.randn(EXPERTS, WIDTH, 4 * WIDTH) / WIDTH**0.5)
        self.down = self.divided(torch.randn(EXPERTS, 4 * WIDTH, WIDTH) / (4 * WIDTH) ** 0.5)

    def divided(self, whole: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(distribute_tensor(whole, self.mesh, [Shard(0)]))

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """`tokens`: [n, WIDTH], sorted by expert; `counts`: [EXPERTS], how many each expert gets."""
        group, size = self.mesh.get_group(), self.mesh.size()
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        sent = counts.view(size, -1).sum(1).tolist()
        taken = received.view(size, -1).sum(1).tolist()
        inputs = all_to_all_single_autograd(tokens, taken, sent, group)
        expert = torch.arange(EXPERTS // size).repeat(size).repeat_interleave(received.cpu()).to(tokens.device)
        up, down = self.up.to_local(), self.down.to_local()
        outputs = torch.zeros_like(inputs)
        for index in range(len(up)):
            mine = (expert == index).nonzero().squeeze(1)
            outputs = outputs.index_add(0, mine, torch.relu(inputs[mine] @ up[index]) @ down[index])
        return all_to_all_single_autograd(outputs, sent, taken, group)


class Block(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False), Experts(mesh)

    def forward(self, x: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`x`: [n, WIDTH]. Also this rank's part of the loss that keeps the experts evenly used."""
        tokens = self.norm(x)
        chances = self.router(tokens).softmax(dim=1)
        chance, expert = chances.max(dim=1)
        counts = expert.bincount(minlength=EXPERTS)
        order = expert.argsort(stable=True)
        outputs = torch.zeros_like(x).index_add(0, order, self.experts(tokens[order], counts))
        used = counts.clone()
        dist.all_reduce(used)
        balance = EXPERTS * (used / num_tokens * chances.sum(0) / num_tokens).sum()
        return x + chance.unsqueeze(1) * outputs, balance


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(mesh) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, sentences: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """This rank's part of the loss of `num_tokens` tokens on all ranks."""
        x = (self.words(sentences[:, :-1]) + self.places.weight).flatten(0, 1)
        loss = x.new_zeros(())
        for block in self.blocks:
            x, balance = block(x, num_tokens)
            loss = loss + 0.01 * balance
        targets = sentences[:, 1:].flatten()
        return loss + nn.functional.cross_entropy(self.head(x), targets, reduction="sum") / num_tokens


def add_gradients(model: nn.Module, copies: dist.ProcessGroup) -> None:
    """Over all ranks; of the experts, over the ranks that hold the same."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad.to_local(), group=copies)
        else:
            dist.all_reduce(parameter.grad)


def save(model: nn.Module, path: str) -> None:
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(whole, path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=24, help="sentences per step, over all ranks")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", default="", help="folder for the weights")
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_default_dtype(getattr(torch, args.dtype))

    def build(parallel: etc.ParallelContext) -> etc.TrainState:
        model = Model(parallel.expert_mesh["ep"]).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        return etc.TrainState(model, optimizer, init="module")

    data = Sentences()
    with etc.session(build, global_batch=args.batch, seed=args.seed) as session:
        for step in session.steps(args.steps):
            with step:
                model, mesh = session.state.model, session.parallel.expert_mesh
                batch = session.batch(data)
                loss = model(batch, args.batch * LENGTH)
                loss.backward()
                add_gradients(model, mesh.get_group("edp"))
                step.commit()
                loss = loss.detach()
                dist.all_reduce(loss)
                if dist.get_rank() == 0:
                    print(f"step {step} loss {loss.item():.12f}", flush=True)
                if args.save and (step + 1) % args.save_every == 0:
                    save(model, f"{args.save}/{step + 1}.pt")


if __name__ == "__main__":
    main()
