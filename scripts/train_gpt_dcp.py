"""Changing a job's size by a restart, for comparison: save a PyTorch distributed checkpoint, start again, load it.

    torchrun --nproc-per-node 2 scripts/train_gpt_dcp.py --parallel PP2TP1DP1 --save-dir /dev/shm/saved --stop-at 20
    torchrun --nproc-per-node 4 scripts/train_gpt_dcp.py --parallel PP2TP2DP1 --save-dir /dev/shm/saved --resume
    torchrun --nproc-per-node 4 --max-restarts 9 scripts/train_gpt_dcp.py --parallel PP2TP1DP2 \
        --save-dir /dev/shm/saved --save-every 1                      # survives a killed worker, by restarting all

Trains the model of train_gpt.py up to `--stop-at` or `--steps`, then saves. The checkpoint holds what a session moves:
parameters, buffers, optimizer state, schedule, step; PyTorch reshards it on loading. Rank 0 prints one JSON line per
event, with the time of day in seconds: imported (Python and its modules are up), ready (state restored or initialised),
first_step and last_step (the end of that step), saved. With `--save-every N` it saves after every N steps, each time
into a folder of its own, and begins with the newest that is complete, if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from gpt.data import ByteSamples
from gpt.options import GptOptions, OptionsError
from gpt.plain import apply_update, batch_of, build_real, plain_world
from gpt.records import StepLog
from gpt.training import train

from etc_agent.integrations.native import TrainState, host_state, load_host_state
from etc_agent.integrations.tensors import named_tensors
from etc_agent.parallel.config import ParallelConfig


def save(state: TrainState, step: int, folder: Path) -> None:
    """Write a checkpoint of the state before step `step`. Collective."""
    dcp.save({**named_tensors(state), "host": _host(state, step)}, checkpoint_id=folder)


def load(state: TrainState, folder: Path) -> int:
    """Fill `state` from a checkpoint of any parallel config. Collective. Returns the step to go on with."""
    contents: dict[str, Any] = {**named_tensors(state), "host": _host(state, 0)}
    dcp.load(contents, checkpoint_id=folder)
    host = json.loads(contents["host"])
    load_host_state(state, host["state"])
    return host["step"]


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that `save_next` has completed below `folder`."""
    complete = [path.parent for path in folder.glob("step-*/.metadata")]  # DCP writes this file last
    return max(complete, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def save_next(state: TrainState, step: int, folder: Path) -> None:
    """`save` into a folder of its own, and remove all but the two newest. Collective."""
    save(state, step, folder / f"step-{step}")
    if int(os.environ["RANK"]) == 0:
        for path in sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))[:-2]:
            shutil.rmtree(path, ignore_errors=True)


def event(name: str, **details: Any) -> None:
    if int(os.environ["RANK"]) == 0:
        print(json.dumps({"event": name, "time": time.time(), **details}), flush=True)


def run(options: GptOptions, arguments: argparse.Namespace) -> None:
    config, folder, log = arguments.parallel, arguments.save_dir, StepLog(arguments.step_log)
    end = options.steps if arguments.stop_at is None else min(arguments.stop_at, options.steps)
    data = ByteSamples(options.data, options.sequence, options.seed)
    with plain_world(config, options.global_batch) as parallel:
        state = build_real(options, parallel)
        source = folder if arguments.resume else newest(folder) if arguments.save_every else None
        first = load(state, source) if source is not None else 0
        event("ready", step=first, config=str(config))
        log.start()
        for step in range(first, end):
            loss = train(state, parallel, batch_of(data, step, parallel))
            apply_update(state)
            log.step(step, loss, parallel)
            if step == first:
                event("first_step", step=step)
            if arguments.save_every and (step + 1) % arguments.save_every == 0:
                save_next(state, step + 1, folder)
        event("last_step", step=end - 1)
        if folder is not None and not arguments.save_every:
            save(state, end, folder)
            event("saved", step=end)


def _host(state: TrainState, step: int) -> str:
    return json.dumps({"step": step, "state": host_state(state)})


def main() -> None:
    event("imported")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    GptOptions.add_arguments(parser)
    parser.add_argument("--parallel", type=ParallelConfig.parse, required=True, help="such as PP2TP2DP1")
    parser.add_argument("--stop-at", type=int, help="stop before this step of the --steps in the schedule")
    parser.add_argument("--save-dir", type=Path, help="folder of the checkpoint")
    parser.add_argument("--resume", action="store_true", help="begin with the checkpoint in --save-dir")
    parser.add_argument("--save-every", type=int, metavar="N", help="save after every N steps, and resume by itself")
    parser.add_argument("--step-log", type=Path, help="append a JSON line per step to this file")
    arguments = parser.parse_args()
    if (arguments.resume or arguments.save_every) and arguments.save_dir is None:
        parser.error("--resume and --save-every need --save-dir, the folder of the checkpoint")
    torch.set_num_threads(1)
    try:
        options = GptOptions.from_arguments(arguments)
        run(options, arguments)
    except OptionsError as error:
        sys.exit(f"train_gpt_dcp: {error}")


if __name__ == "__main__":
    main()
