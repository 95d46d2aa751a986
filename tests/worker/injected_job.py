"""A training job whose workers die where a test says, and that writes down enough to be compared bit for bit.

    injected_job.py FOLDER NUM_STEPS PAUSE_S [JSON]

The JSON object may have `model` ("gpt", with pipeline stages and microbatches; "ddp", DistributedDataParallel with
several buckets; "fsdp", sharded over dp; "hsdp", sharded over the axis tp with replicas over dp) and `gates`: steps
that do not begin before a planned change is armed, so that it takes place exactly at their end. ``gate-<step>`` appears
in FOLDER when the job waits for it.

Each rank writes a JSON line per step that was applied: its place, a hash of its state before the step, and what it
trained on. A file ``die-<step>.json`` in FOLDER makes a rank die in that step, ``die-change.json`` a worker in the next
change, ``die-copies.json`` a rank that has begun to send its copy (see `Death`).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import torch
import torch.distributed as dist
from gpt import gradients, training
from gpt.data import ByteSamples
from gpt.options import GptOptions
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import etc_agent as etc
from etc_agent.integrations.native import shards_of
from etc_agent.migration.keep import KeepingMigration
from etc_agent.migration.release import ReleasingMigration
from etc_agent.worker.change import change as change_module
from etc_agent.worker.change.attempt import Attempt
from etc_agent.worker.redundancy import copier as copier_module
from etc_agent.worker.vote import Vote

OPTIONS = GptOptions(
    layers=4, hidden=24, heads=12, sequence=16, global_batch=12, microbatch=1, steps=1000, warmup=5,
    data=Path(__file__).parent,
)
WIDTH = 12
STEP_POINTS = (
    "begin", "forward", "backward", "reduction", "before_vote", "in_vote", "after_vote", "in_optimizer", "applied",
    "safe_point",
)
CHANGE_POINTS = ("prepare", "prepared", "begin", "midway", "before_commit", "after_commit")


@dataclass(frozen=True)
class Death:
    """Who dies, and where.

    `who`: a rank of the generation that runs the step, or of the one before a change; in a change also "joiner" or
    "leaver". `point`: one of `STEP_POINTS`, in a change of `CHANGE_POINTS`. `pids`: what the victim kills at that
    point; itself if empty. `stops`: it is stopped instead, until somebody kills it. `exits`: it ends with exit code 0,
    without a word to anybody. `blind`: ranks that do not see the
    result of the vote of that step, although others do.
    """

    who: int | str
    point: str
    pids: list[int] = field(default_factory=list)
    stops: bool = False
    exits: bool = False
    blind: list[int] = field(default_factory=list)

    def write(self, folder: Path, step: int | str = "change") -> None:
        """Let it happen in `step`, in the next "change", or while "copies" are sent."""
        path = folder / f"die-{step}.json"
        path.with_suffix(".part").write_text(json.dumps(asdict(self)))
        path.with_suffix(".part").rename(path)

    def strike(self) -> None:
        own = os.getpid()
        if self.exits:
            os._exit(0)
        for pid in [pid for pid in self.pids if pid != own]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if not self.pids or own in self.pids:
            os.kill(own, signal.SIGSTOP if self.stops else signal.SIGKILL)


def read(path: Path) -> Death | None:
    try:
        return Death(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


class Fate:
    """What this process is to die of, asked wherever a death may be wanted."""

    def __init__(self) -> None:
        self.folder = Path()
        self.rank = -1
        self.is_voting = False
        self._death: Death | None = None
        self._path = Path()
        self._reductions = 0
        self._in_change: int | str = ""

    def begin_step(self, step: int, rank: int) -> None:
        self._path, self._reductions, self.rank = self.folder / f"die-{step}.json", 0, rank
        self._death = read(self._path)

    @property
    def is_blind(self) -> bool:
        return self._death is not None and self.rank in self._death.blind

    def meets(self, point: str) -> bool:
        return self._death is not None and self._death.who == self.rank and self._death.point == point

    def at(self, point: str) -> None:
        """A point in a step."""
        if self.meets(point):
            assert self._death is not None
            self._path.unlink()  # the step may run again, and then nobody dies
            self._death.strike()

    def reduce(self) -> None:
        """A bucket of gradients is about to be summed."""
        self._reductions += 1
        if self._reductions == 2:
            self.at("reduction")

    def prepare(self, order: change_module.Order) -> None:
        """A change begins, in which this worker is a joiner, a leaver, or goes on from its rank."""
        if not order.in_force:
            self._in_change = "joiner"
        elif order.slot not in order.generation.placement:
            self._in_change = "leaver"
        else:
            self._in_change = order.previous.placement.index(order.slot)

    def in_change(self, point: str) -> None:
        """A point in a change."""
        path = self.folder / "die-change.json"
        death = read(path)
        if death is not None and death.point == point and death.who == self._in_change:
            try:
                path.unlink()
            except FileNotFoundError:  # another one that joins, or leaves, was faster
                return
            death.strike()


FATE = Fate()


def install_hooks() -> None:
    """Put `FATE` into the vote, the sum of gradients, and the parts of a change."""
    cast, to_begin, to_commit = Vote.cast, Attempt.vote_to_begin, Attempt.vote_to_commit
    prepare, sum_bucket, exchange = change_module.prepare, gradients._sum_bucket, copier_module.exchange

    def mortal_cast(self: Any, *ballot: Any) -> Any:
        if not FATE.is_voting:
            return cast(self, *ballot)
        FATE.is_voting = False
        if FATE.meets("in_vote"):
            values = torch.tensor([int(value) for value in astuple(ballot[0])], dtype=torch.int32)
            work = self.group.allreduce([values], dist.AllreduceOptions())
            FATE.at("in_vote")
            work.wait()
        result = cast(self, *ballot)
        if FATE.is_blind:
            # The others have the result. Nobody takes part in this second vote: it breaks off when it is cut.
            cast(self, *ballot)
            raise AssertionError("a vote that nobody else takes part in cannot succeed")
        FATE.at("after_vote")
        return result

    def mortal_sum(*arguments: Any) -> None:
        FATE.reduce()
        sum_bucket(*arguments)

    def mortal_prepare(change: Any, *arguments: Any) -> Any:
        FATE.prepare(change._order)
        FATE.in_change("prepare")
        prepared = prepare(change, *arguments)
        FATE.in_change("prepared")
        return prepared

    def mortal_run(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_and_die(self: Any, progress: Any = None) -> Any:
            def tell(done: int, total: int) -> None:
                if 2 * done >= total:
                    FATE.in_change("midway")

            return run(self, tell)

        return run_and_die

    def mortal_begin(*arguments: Any) -> Any:
        FATE.in_change("begin")
        return to_begin(*arguments)

    def mortal_commit(*arguments: Any) -> Any:
        FATE.in_change("before_commit")
        committed = to_commit(*arguments)
        FATE.in_change("after_commit")
        return committed

    def mortal_send(*arguments: Any, **options: Any) -> Any:
        path = FATE.folder / "die-copies.json"
        death = read(path)
        if death is not None and death.who == FATE.rank:
            group, copies = arguments
            keeper = copies.blocks[next(iter(copies.layout.sent))].keeper
            header = torch.tensor([copies.number, len(copies.own_values)])
            group.send([header], keeper, 0).wait()
            path.unlink()
            death.strike()
        return exchange(*arguments, **options)

    copier_module.exchange = mortal_send
    Vote.cast = mortal_cast  # type: ignore[method-assign]
    change_module.prepare = mortal_prepare
    Attempt.vote_to_begin, Attempt.vote_to_commit = mortal_begin, mortal_commit  # type: ignore[method-assign]
    for mode in (KeepingMigration, ReleasingMigration):
        mode.run = mortal_run(mode.run)  # type: ignore[method-assign]
    gradients._sum_bucket = mortal_sum
    gradients.BUCKET_BYTES = 4096  # several buckets, small as the model is


class Count:
    """An extra: equal on every rank, or a coordinate's own (`rule`)."""

    def __init__(self, rule: str) -> None:
        self.rule, self.value = rule, 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.value = state_dict["value"]


def watched(state: etc.TrainState) -> etc.TrainState:
    """`state`, each of whose forward passes writes a buffer and an extra, draws a random number, and may be the last;
    so may the backward pass and the optimizer's step."""
    model, counts = state.model, {"forwards": Count("replicated"), "steps": Count("per_rank")}
    assert state.optimizer is not None

    def before(module: nn.Module, inputs: Any) -> None:
        FATE.at("forward")
        model.seen += 1
        counts["forwards"].value += 1
        torch.rand(())

    def after(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if FATE.meets("backward") and output.requires_grad:
            output.register_hook(lambda gradient: FATE.at("backward"))

    def step_half(optimizer: Any, args: Any, kwargs: Any) -> None:
        if FATE.meets("in_optimizer"):
            for parameter in list(model.parameters())[::2]:
                parameter.data.mul_(0.5)
            FATE.at("in_optimizer")

    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    model.register_forward_pre_hook(before)
    model.register_forward_hook(after)
    state.optimizer.register_step_pre_hook(step_half)
    state.extras = counts
    return state


def start(state: etc.TrainState) -> None:
    """Weights as a function of name and position, whatever the sharding."""
    for shard, local in shards_of(state).items():
        name, cut = shard.tensor.name, zip(shard.box.offset, shard.box.shape, strict=True)
        if not name.startswith("model."):
            continue
        if name.endswith("seen"):
            local.zero_()
        elif name.endswith("inverse_frequency"):
            local.copy_(10000.0 ** -(torch.arange(len(local)) / len(local)))
        else:
            generator = torch.Generator().manual_seed(sum(name.encode()))
            whole = torch.rand(shard.tensor.shape, generator=generator) * 0.1
            local.copy_(whole[tuple(slice(offset, offset + size) for offset, size in cut)])


def build_gpt(parallel: etc.ParallelContext) -> etc.TrainState:
    state = training.build(OPTIONS, parallel)
    state.init = start
    return watched(state)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def build_ddp(parallel: etc.ParallelContext) -> etc.TrainState:
    if parallel.config.pp > 1 or parallel.config.tp > 1:
        raise ValueError(f"{parallel.config}: this model is only data parallel")
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return watched(etc.TrainState(model, optimizer, init=start))


def build_fsdp(parallel: etc.ParallelContext) -> etc.TrainState:
    if parallel.config.pp > 1 or parallel.config.tp > 1:
        raise ValueError(f"{parallel.config}: this model is only data parallel")
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=parallel.mesh["dp"])
    fully_shard(model, mesh=parallel.mesh["dp"])
    return watched(etc.TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-3), init=start))


def build_hsdp(parallel: etc.ParallelContext) -> etc.TrainState:
    if parallel.config.pp > 1:
        raise ValueError(f"{parallel.config}: this model has no stages")
    model = Net()
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=parallel.mesh["dp", "tp"])
    return watched(etc.TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-3), init=start))


def train_fsdp(state: etc.TrainState, parallel: etc.ParallelContext, batch: torch.Tensor) -> float:
    loss = ((state.model(batch) - torch.cos(batch)) ** 2).mean()
    loss.backward()
    whole = loss.detach() / parallel.config.dp
    dist.all_reduce(whole)
    return whole.item()


def train_ddp(state: etc.TrainState, parallel: etc.ParallelContext, batch: torch.Tensor) -> float:
    if state.runtime is None:
        group = parallel.mesh.get_group("dp")
        state.runtime = DistributedDataParallel(
            state.model, process_group=group, broadcast_buffers=False, bucket_cap_mb=0.0005
        )

        def hook(group, bucket):  # DDP reads annotations, and wants its own or none
            FATE.reduce()
            return allreduce_hook(group, bucket)

        state.runtime.register_comm_hook(group, hook)
    loss = ((state.runtime(batch) - torch.cos(batch)) ** 2).mean()
    loss.backward()
    whole = loss.detach() / parallel.config.dp
    dist.all_reduce(whole)
    return whole.item()


MODELS = {"gpt": (training.train, build_gpt), "ddp": (train_ddp, build_ddp), "fsdp": (train_fsdp, build_fsdp),
          "hsdp": (train_fsdp, build_hsdp)}


class Sines:
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(WIDTH, dtype=torch.float32) * (index % 97 + 1) * 0.1)


def digest(state: etc.TrainState) -> str:
    """A hash of everything that this rank holds, but for its random stream."""
    found = hashlib.sha1()
    for shard, local in sorted(shards_of(state).items(), key=lambda item: (item[0].tensor.name, item[0].box.offset)):
        found.update(f"{shard.tensor.name} {shard.box}".encode())
        found.update(local.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    assert state.optimizer is not None
    found.update(json.dumps([group["lr"] for group in state.optimizer.param_groups]).encode())
    return found.hexdigest()


def await_gate(session: etc.Session) -> None:
    """Wait until the planned change is armed: this step's vote then finds every rank ready for it."""
    if session.parallel.rank == 0:
        (FATE.folder / f"gate-{session.step}").touch()
    conversation = session._job._conversation  # type: ignore[union-attr]
    while not conversation.armed():
        conversation.at_safe_point(session._job.live)  # type: ignore[union-attr]
        time.sleep(0.002)


def main(folder: Path, num_steps: int, pause_s: float, fault: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    FATE.folder = folder
    install_hooks()
    model = fault.get("model", "gpt")
    data = ByteSamples(OPTIONS.data, OPTIONS.sequence, 1) if model == "gpt" else Sines()
    train, build = MODELS[model]
    ids: list[int] = []
    with (
        open(folder / f"steps-{os.getpid()}.jsonl", "a", buffering=1) as log,
        etc.session(
            build, global_batch=12, seed=7, record=lambda step, seen: ids.__setitem__(slice(None), seen),
            timeout_s=60.0, switch_timeout_s=60.0, abort_timeout_s=fault.get("abort_timeout_s", 60.0),
            migration=fault.get("migration", "auto"),
        ) as session,
    ):
        for step in session.steps(num_steps):
            parallel = session.parallel
            if step.index in fault.get("gates", ()):
                await_gate(session)
            FATE.begin_step(step.index, parallel.rank)
            place = parallel.coordinate
            counts = {name: extra.value for name, extra in session.state.extras.items()}
            line = {
                "step": step.index, "generation": parallel.generation, "config": str(parallel.config),
                "rank": parallel.rank, "place": [place.pp, place.dp, place.tp], "pid": os.getpid(),
                "slot": f"{os.environ.get('MARK', '')}/{os.environ['LOCAL_RANK']}", "digest": digest(session.state),
                "stream": hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest(),
                "forwards": counts["forwards"], "own_steps": counts["steps"], "began": time.time(),
            }
            with step:
                FATE.at("begin")
                loss = train(session.state, parallel, session.batch(data))
                FATE.at("before_vote")
                FATE.is_voting = True
                step.commit()
                FATE.at("applied")
            FATE.is_voting = False
            if step.is_committed:
                session.state.extras["steps"].value += 1
                log.write(json.dumps({**line, "loss": loss, "ids": ids, "time": time.time()}) + "\n")
            else:
                log.write(json.dumps({**line, "retried": True}) + "\n")
            FATE.at("safe_point")
            time.sleep(pause_s)
            if (folder / "last").exists() and step.index >= int((folder / "last").read_text()):
                break


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4]) if len(sys.argv) > 4 else {})
