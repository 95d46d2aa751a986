"""Train a byte-level GPT with pipeline, tensor and data parallelism.

    etc-run --config configs/gpt-tiny.yaml                                           # changes size while it trains
    torchrun --nproc-per-node 4 scripts/train_gpt.py --parallel PP2TP2DP1            # a fixed size
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
from gpt.options import GptOptions, OptionsError
from gpt.plain import apply_update, batch_of, build_real, plain_world, sample_ids
from gpt.records import SampleLog, StepLog
from gpt.training import build, train

import etc_agent as etc
from etc_agent.parallel.config import ParallelConfig


def run_session(options: GptOptions, arguments: argparse.Namespace, data: ByteSamples) -> None:
    """Train in a session: under etc-run the job may change size between any two steps."""
    log, samples = StepLog(arguments.step_log), SampleLog(arguments.sample_log)
    with etc.session(
        partial(build, options),
        global_batch=options.global_batch,
        seed=options.seed,
        parallel=arguments.parallel,
        record=lambda step, ids: samples.append(step, ids, session.parallel),
    ) as session:
        log.start()
        for step in session.steps(options.steps):
            with step:
                loss = train(session.state, session.parallel, session.batch(data))
                step.commit()
            if step.is_committed:  # otherwise workers were lost in it, and it runs again
                log.step(step.index, loss, session.parallel)


def run_plain(options: GptOptions, arguments: argparse.Namespace, data: ByteSamples) -> None:
    """Train at a fixed size without a session."""
    config = arguments.parallel or ParallelConfig(dp=int(os.environ["WORLD_SIZE"]))
    log, samples = StepLog(arguments.step_log), SampleLog(arguments.sample_log)
    with plain_world(config, options.global_batch) as parallel:
        state = build_real(options, parallel)
        log.start()
        for step in range(options.steps):
            loss = train(state, parallel, batch_of(data, step, parallel))
            apply_update(state)
            samples.append(step, sample_ids(step, parallel), parallel)
            log.step(step, loss, parallel)


def _config(text: str) -> ParallelConfig:
    try:
        return ParallelConfig.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    GptOptions.add_arguments(parser)
    parser.add_argument("--parallel", type=_config, help="such as PP2TP2DP1; etc-run sets its own")
    parser.add_argument("--plain", action="store_true", help="train without a session, under plain torchrun")
    # torchrun takes a bare --log for one of its own; the short name is for job files.
    parser.add_argument("--step-log", "--log", type=Path, help="append a JSON line per step to this file")
    parser.add_argument("--sample-log", type=Path, help="folder for the ids of the samples that each worker trained on")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a worker")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    try:
        options = GptOptions.from_arguments(arguments)
        data = ByteSamples(options.data, options.sequence, options.seed)
        (run_plain if arguments.plain else run_session)(options, arguments, data)
    except (OptionsError, etc.EtcError) as error:
        sys.exit(f"train_gpt: {error}")


if __name__ == "__main__":
    main()
