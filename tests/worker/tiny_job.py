"""A tiny training job for the tests of the worker room: real processes, real DTensor parameters, a real optimizer.

Each of its layers learns a target of its own, so that pipeline stages need no activations from each other and the loss
is the same function under every config, up to the order of sums.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rebinding import rebind
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import etc_agent as etc
from etc_agent.integrations.native import shards_of
from etc_agent.migration.keep import KeepingMigration
from etc_agent.migration.release import ReleasingMigration
from etc_agent.worker.change.errors import SwitchError
from etc_agent.worker.change.prepared import PreparedGeneration
from etc_agent.worker.change.state.shard_dumps import dump_shards
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.world.swap import World

LAYERS, WIDTH, HIDDEN = 5, 8, 12
FAULT: dict[str, Any] = {}


def hidden() -> int:
    return int(FAULT.get("hidden", HIDDEN))


def layers() -> int:
    return int(FAULT.get("layers", LAYERS))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden())
        self.down = nn.Linear(hidden(), WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=False)
        self.register_buffer("last_scale", self.scale[-1:], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        assert self.last_scale.data_ptr() == self.scale[-1:].data_ptr(), "a view has become a tensor of its own"
        return self.down(torch.tanh(self.up(x))) * self.scale


LIVE: dict[str, Any] = {"model": None}
BUILDS: list[str] = []
"""What the calls of build() in this process have come to, in that order."""
WALKERS: set[str] = set()
"""Names of the threads other than the main one that have walked through the live model."""


class Stage(nn.Module):
    """The layers of one pipeline stage, under the names that they have in the whole model."""

    def named_modules(self, *args: Any, **options: Any) -> Iterator[Any]:
        """What every walk over modules, parameters and buffers goes through."""
        if self is LIVE["model"] and threading.current_thread() is not threading.main_thread():
            WALKERS.add(threading.current_thread().name)
        return super().named_modules(*args, **options)

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): Block() for layer in layers})


def build(parallel: etc.ParallelContext) -> etc.TrainState:
    pp, tp = parallel.config.pp, parallel.config.tp
    if hidden() % tp:
        raise ValueError(f"{parallel.config}: {hidden()} hidden units cannot be divided over tp={tp}")
    if pp > layers():
        raise ValueError(f"{parallel.config}: {layers()} layers cannot fill pp={pp} stages")
    if (parallel.generation, parallel.rank) == (1, FAULT.get("refusing_rank")):
        raise ValueError(f"rank {parallel.rank} has no data")
    if FAULT.get("slow_build") == parallel.generation:
        BUILDS.append(f"begun {parallel.generation}")
        time.sleep(3.0)
    BUILDS.append(f"built {parallel.generation}")
    stage = parallel.coordinate.pp
    model = Stage(range(stage * layers() // pp, (stage + 1) * layers() // pp))
    if tp > 1:
        plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
        parallelize_module(model, parallel.mesh["tp"], plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.01 * step))
    if FAULT.get("forget_scheduler") == [parallel.generation, parallel.rank]:
        scheduler = None
    extras = {"own": Own(), "seen": Seen(), "notes": Notes()}
    replicas = local_group(parallel) if FAULT.get("local_groups") else parallel.mesh.get_group("dp")
    return etc.TrainState(model, optimizer, scheduler, extras=extras, runtime=replicas, init=initialise)


def local_group(parallel: etc.ParallelContext) -> dist.ProcessGroup:
    """The ranks that differ in dp alone, in a group that they make without the others: its name follows from them."""
    ranks = dist.get_process_group_ranks(parallel.mesh.get_group("dp"))
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def fail_to_be_read(extra: str) -> None:
    """Raise, where the fault ``{"unreadable": [EXTRA, RANK]}`` names this extra on this rank, while there is a file
    of that name."""
    if FAULT.get("unreadable") == [extra, int(os.environ["RANK"])] and (FAULT["log"] / "unreadable").exists():
        raise LookupError(f"the state of {extra} is not at hand")


class Notes:
    """State that is the same on every rank: none."""

    def state_dict(self) -> dict[str, Any]:
        fail_to_be_read("notes")
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == {}


class Own:
    """State of one place in the grid: how often it has trained."""

    rule = "per_rank"

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        fail_to_be_read("own")
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


class Seen:
    """State by sample: in which step it was last trained on; the latest few."""

    rule = "per_sample"

    def __init__(self) -> None:
        self.last: dict[int, int] = {}

    def note(self, ids: list[int], step: int) -> None:
        self.last |= dict.fromkeys(ids, step)
        self.last = {sample: at for sample, at in self.last.items() if at > step - 3}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.last)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last = dict(state_dict)


def initialise(state: etc.TrainState) -> None:
    """Weights as a function of name and position, whatever the sharding."""
    for shard, local in shards_of(state).items():
        if shard.tensor.name.endswith("scale"):
            local.fill_(0.5)
        elif shard.tensor.name.startswith("model.") and local.is_floating_point():
            generator = torch.Generator().manual_seed(sum(shard.tensor.name.encode()))
            whole = torch.rand(shard.tensor.shape, generator=generator) - 0.5
            part = tuple(slice(o, o + n) for o, n in zip(shard.box.offset, shard.box.shape, strict=True))
            local.copy_(whole[part])
        elif shard.tensor.name.endswith("seen"):
            local.zero_()


class Samples:
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(WIDTH, dtype=torch.float32) * (index % 97 + 1) * 0.1)


def train(state: etc.TrainState, parallel: etc.ParallelContext, batch: torch.Tensor) -> torch.Tensor:
    """Mean loss over the whole job; gradients are left as those of that mean."""
    loss = torch.zeros(())
    for name, block in state.model.layers.items():
        loss = loss + ((block(batch) - torch.cos(batch + int(name))) ** 2).mean()
    (loss / parallel.config.dp).backward()
    if parallel.config.dp > 1:
        for parameter in state.model.parameters():
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if FAULT.get("local_groups"):
                # As DTensor does it: the group is looked up by its name.
                local.copy_(functional.all_reduce(local, "sum", state.runtime))
            else:
                dist.all_reduce(local, group=state.runtime)
    whole = loss.detach() / (parallel.config.dp * parallel.config.tp)
    dist.all_reduce(whole)
    return whole


def hang_in_connecting() -> None:
    """Have this process never come to the end of a preparation."""

    def hang(self: KeepingMigration) -> None:
        time.sleep(600)

    KeepingMigration.prepare = hang  # type: ignore[method-assign]


def flush_slowly(seconds: float) -> None:
    """Have every flush of a file to the disk take so long more."""
    flush = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(seconds)
        flush(descriptor)

    os.fsync = slow  # type: ignore[assignment]


def have_no_space_once() -> None:
    """Have the first flush of a file in this process fail, as on a full disk."""
    flush = os.fsync

    def full(descriptor: int) -> None:
        os.fsync = flush
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync = full  # type: ignore[assignment]


def living() -> dict[str, int]:
    """How many objects of those kinds are referred to in this process."""
    gc.collect()
    kinds = (etc.TrainState, World, LiveGeneration, PreparedGeneration, KeepingMigration, ReleasingMigration)
    return {kind.__name__: sum(isinstance(each, kind) for each in gc.get_objects()) for kind in kinds}


def die_midway(after: float, migration: int = 1) -> None:
    """Have this process die by SIGKILL in its so many-th migration, when the part `after` of what it sends and receives
    is done."""
    begun = 0

    def dying(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_and_die(self: Any, progress: Any = None) -> Any:
            nonlocal begun
            begun += 1
            if begun < migration:
                return run(self, progress)
            die(0, 1)
            return run(self, die)

        return run_and_die

    def die(done: int, total: int) -> None:
        if done >= after * total:
            os.kill(os.getpid(), signal.SIGKILL)

    for mode in (KeepingMigration, ReleasingMigration):
        mode.run = dying(mode.run)  # type: ignore[method-assign]


@contextmanager
def saving_what_is_left(log: Path, session: etc.Session) -> Iterator[None]:
    """When the job breaks off in a change, write what this worker still holds, for a test to look at."""
    try:
        yield
    except SwitchError:
        dump_shards(str(log), session.generation, "left", session.parallel.rank, shards_of(session.state))
        raise


def main(log: Path, num_steps: int, pause_s: float, fault: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    FAULT.update(fault, log=log)
    if os.environ["LOCAL_RANK"] == str(fault.get("die_midway")) and not (log / "died").exists():
        (log / "died").touch()
        die_midway(fault["after"])
    if os.environ["LOCAL_RANK"] == str(fault.get("hang_in_connecting")):
        hang_in_connecting()
    if os.environ["LOCAL_RANK"] == str(fault.get("full_disk")):
        have_no_space_once()
    if fault.get("slow_flush_s"):
        flush_slowly(fault["slow_flush_s"])
    ids: dict[str, Any] = {}
    with etc.session(
        build, global_batch=12, seed=7, record=lambda step, seen: ids.update(step=step, ids=list(seen)),
        timeout_s=fault.get("timeout_s", 60.0), switch_timeout_s=fault.get("switch_timeout_s", 60.0),
        loss_timeout_s=fault.get("loss_timeout_s", 60.0),
        migration=fault.get("migration", "auto"), budget_bytes=fault.get("budget_bytes"),
        checkpoint=etc.Checkpoint(**fault["checkpoint"]) if "checkpoint" in fault else None,
    ) as session, saving_what_is_left(log, session):
        data = Samples()
        for step in session.steps(num_steps):
            LIVE["model"] = session.state.model
            with step:
                loss = train(session.state, session.parallel, session.batch(data))
                if fault.get("raise_at") == step.index and session.parallel.rank == 0:
                    if fault.get("raises") == "reset":
                        raise ConnectionResetError("connection reset by peer")
                    raise KeyError("a bug in user code")
                if fault.get("hang_at") == step.index and session.parallel.rank == 1:
                    time.sleep(600)
                step.commit()
            if not step.is_committed:
                continue
            if (log / f"rebind-{step.index}").exists():
                rebind(session.state, (log / f"rebind-{step.index}").read_text())
            own, seen = session.state.extras["own"], session.state.extras["seen"]
            own.steps += 1
            seen.note(ids["ids"], step.index)
            line = {
                "pid": os.getpid(), "step": step.index, "loss": loss.item(), "generation": session.generation,
                "config": str(session.parallel.config), "rank": session.parallel.rank,
                "dp": session.parallel.coordinate.dp, "ids": ids["ids"], "env_rank": int(os.environ["RANK"]),
                "env_world_size": int(os.environ["WORLD_SIZE"]), "local_rank": os.environ["LOCAL_RANK"],
                "lr": session.state.optimizer.param_groups[0]["lr"], "time": time.time(),
                "fds": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
                "python_threads": sorted(thread.name for thread in threading.enumerate()), "walkers": sorted(WALKERS),
                "builds": list(BUILDS),
                "living": living() if fault.get("counts") else {},
                "own_steps": own.steps, "seen": sorted(seen.last),
                "shared": Path("/proc/self/maps").read_text().count("memfd:etc-run-state"),
            }
            with open(log / f"steps-{os.getpid()}.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
            time.sleep(pause_s)
            if (log / "last").exists() and step.index >= int((log / "last").read_text()):
                break


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4]) if len(sys.argv) > 4 else {})
