"""Train a byte-level GPT with pipeline, tensor and data parallelism.

    etc-run --config configs/gpt-tiny.yaml
    torchrun --nproc-per-node 4 scripts/train_gpt.py --parallel PP2TP2DP1            # fixed size
    torchrun --nproc-per-node 4 scripts/train_gpt.py --parallel PP2TP2DP1 --plain    # without a session at all
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import torch
from gpt.data import ByteSamples
from gpt.options import GptOptions
from gpt.plain import apply_update, batch_of, build_real, plain_world
from gpt.records import StepLog, append_samples
from gpt.training import build, report_rank, train

import etc_agent as etc
from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.context import ParallelContext, local_sample_ids


def run_plain(options: GptOptions, arguments: argparse.Namespace, data: ByteSamples) -> None:
    """Train at a fixed size without a session."""
    with plain_world(_config(arguments), options.global_batch) as parallel:
        state = build_real(options, parallel)
        log = StepLog(arguments.log)
        for step in range(options.steps):
            loss = train(state, parallel, batch_of(data, step, parallel))
            apply_update(state)
            _report(log, arguments.sample_log, step, loss, parallel)


def run_session(options: GptOptions, arguments: argparse.Namespace, data: ByteSamples) -> None:
    """Train in a session: under etc-run the job may change size between any two steps."""
    config = None if arguments.parallel is None else str(arguments.parallel)
    log = StepLog(arguments.log)
    with etc.session(
        partial(build, options), global_batch=options.global_batch, seed=options.seed, parallel=config
    ) as session:
        for step in session.steps(options.steps):
            with step:
                loss = train(session.state, session.parallel, session.batch(data))
                step.commit()
            _report(log, arguments.sample_log, step.index, loss, session.parallel)


def _report(log: StepLog, sample_log: Path | None, step: int, loss: float | None, parallel: ParallelContext) -> None:
    if loss is not None and report_rank(parallel):
        log.step(step, loss, parallel.generation, parallel.config)
    else:
        log.tick()
    if sample_log is not None:
        place = parallel.coordinate
        append_samples(
            sample_log, os.getpid(), step, parallel.generation,
            f"pp{place.pp}dp{place.dp}tp{place.tp}", local_sample_ids(step, parallel),
        )


def _config(arguments: argparse.Namespace) -> ParallelConfig:
    return arguments.parallel or ParallelConfig(dp=int(os.environ["WORLD_SIZE"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    GptOptions.add_arguments(parser)
    parser.add_argument("--parallel", type=ParallelConfig.parse, help="such as PP2TP2DP1; without etc-run only")
    parser.add_argument("--plain", action="store_true", help="train without a session, under plain torchrun")
    parser.add_argument("--log", type=Path, help="append a JSON line per step to this file")
    parser.add_argument("--sample-log", type=Path, help="folder for the sample ids that each worker trained on")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a worker")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    try:
        options = GptOptions.from_arguments(arguments)
        if arguments.plain:
            options.check(_config(arguments))
        data = ByteSamples(options.data, options.sequence, options.seed)
    except ValueError as error:
        sys.exit(f"train_gpt: {error}")
    (run_plain if arguments.plain else run_session)(options, arguments, data)


if __name__ == "__main__":
    main()
