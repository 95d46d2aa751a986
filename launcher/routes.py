"""Which launcher runs the job that was typed (etc-run's agent or torchrun), and running it.

With ``--standalone``, etcd servers or ``--rdzv-backend=etcd-v3`` our agent runs the job. Everything else goes to
torchrun's own code, untouched.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import record

from etc_agent.agent.ending import Ending
from etc_agent.agent.settings import JobSettings
from etc_agent.agent.telemetry.verdict import Verdict, write
from etc_agent.errors import EtcError
from launcher.error_file import write_end, write_error
from launcher.given import Given
from launcher.merge import job_settings
from launcher.options import ELASTIC_BACKEND, CommandLine, parse_command_line
from launcher.telemetry import verdict_file, verdict_of


class Route(Enum):
    """Who runs the job."""

    TORCHRUN = "torchrun"
    STANDALONE = "our agent, with a private etcd"
    ETCD = "our agent, with the etcd that was given"


def route(given: Given) -> Route:
    """Who runs the job; what was typed decides before the environment, and that before the job file.

    Raises:
        EtcError: one source asks for two of them.
    """
    args = given.line.args
    for source in (given.line.typed, given.line.from_environment):
        standalone = "standalone" in source and args.standalone
        endpoints, backend = source.get("etcd_endpoints"), source.get("rdzv_backend")
        if standalone and endpoints:
            raise EtcError(f"--standalone starts an etcd of its own; leave out {endpoints}, or leave out --standalone")
        if standalone:
            return Route.STANDALONE
        if endpoints and backend and args.rdzv_backend != ELASTIC_BACKEND:
            raise EtcError(f"{endpoints} needs {backend}={ELASTIC_BACKEND}, not {args.rdzv_backend}; leave it out")
        if endpoints or (backend and args.rdzv_backend == ELASTIC_BACKEND):
            return Route.ETCD
        if backend:
            return Route.STANDALONE if args.standalone else Route.TORCHRUN
    return Route.ETCD if given.job.rendezvous.endpoints else Route.TORCHRUN


def read(argv: Sequence[str]) -> JobSettings | argparse.Namespace:
    """Settings for our agent, or the arguments for torchrun, from a command line without the program's name.

    Raises:
        EtcError: a mistake, in one line (a job file's mistakes: one line each).
    """
    return choose(parse_command_line(argv))


def choose(line: CommandLine) -> JobSettings | argparse.Namespace:
    """The same, from a parsed command line."""
    given = Given.read(line)
    chosen = route(given)
    if chosen is not Route.TORCHRUN:
        return job_settings(given, standalone=chosen is Route.STANDALONE)
    _refuse_our_options(line)
    return line.args


def _refuse_our_options(line: CommandLine) -> None:
    """Refuse options that torchrun does not know, since it would silently ignore them."""
    ours = line.our_options_typed or [name for name in (line.given("config"),) if name]
    if ours:
        raise EtcError(
            f"{ours[0]}: this job has no etcd to change its size by; add --standalone (one node) or "
            "--etcd-endpoints HOST:PORT"
        )


@record
def _run_as_torchrun(args: argparse.Namespace) -> None:
    torchrun.run(args)


def run_command_line(argv: Sequence[str]) -> int:
    """Run the job; the exit code is the job's, or 2 where it could not be read."""
    try:
        line = parse_command_line(argv)
    except EtcError as error:
        return _complain(error, 2)
    except SystemExit as ended:  # by torchrun's parser, which has said why; 0 for --help
        if ended.code:
            _refuse(verdict_file(argv), EtcError("the command line cannot be read"))
        raise
    try:
        settings = choose(line)
    except EtcError as error:
        _refuse(verdict_of(line), error)
        return _complain(error, 2)
    hide_password()
    if isinstance(settings, argparse.Namespace):
        _run_as_torchrun(settings)
        return 0
    from etc_agent.agent.launch import run_job  # under torchrun's own route nothing of the agent is loaded

    try:
        end = run_job(settings)
    except EtcError as error:
        return _complain(error, 1)
    write_end(end)
    has_left = end.ending is Ending.LEFT and end.start_again
    return settings.telemetry.left_exit_code if has_left else end.exit_code


def _refuse(file: Path | None, error: EtcError) -> None:
    """Write a verdict on a mistake in what was given: another try will not help."""
    write(file, Verdict.refused("", error, 2, start_again=False))


def hide_password() -> None:
    """Remove the password from the environment, which the workers inherit."""
    os.environ.pop("ETC_PASSWORD", None)


def _complain(error: EtcError, exit_code: int) -> int:
    write_error(error)
    for line in str(error).splitlines():
        print(f"etc-run: {line}", file=sys.stderr)
    return exit_code
