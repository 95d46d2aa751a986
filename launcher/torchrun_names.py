"""What `torch.distributed.run` offers to programs besides its `main`, for jobs of ours: `launcher.run` has these names,
and takes the others from there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torch.distributed import run as torchrun

from launcher.api import run_settings
from launcher.options import build_parser, command_line_of, parse_command_line
from launcher.routes import choose, hide_password


def get_args_parser() -> argparse.ArgumentParser:
    """torchrun's parser with our options."""
    return build_parser()


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """What a command line without the program's name says; None for that of this process."""
    return parse_command_line(sys.argv[1:] if args is None else args).args


def run(args: argparse.Namespace) -> None:
    """Run the job that `args` describe, as `parse_args` here or torchrun's own has read them.

    Raises:
        EtcError: they cannot work, or the job could not begin. JobFailed, JobStopped: it has not ended well. Where the
            job is torchrun's, what that raises.
    """
    settings = choose(command_line_of(args))
    hide_password()
    if isinstance(settings, argparse.Namespace):
        torchrun.run(settings)
    else:
        run_settings(settings)
