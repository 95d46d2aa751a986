"""etc-run: starts a training job as torchrun does, and changes its size while it trains.

A program finds here what it finds in `torch.distributed.run`: `main`, `get_args_parser`, `parse_args`, `run`, and from
there unchanged `config_from_args`, `parse_min_max_nnodes` and the rest. All but `main` load torch when first used.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from etc_agent.agent.safety.first_process import beside_first_process

_OURS = ("get_args_parser", "parse_args", "run")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that is typed after the program's name, or in `argv`; the exit code is the job's."""
    if argv is None:  # it is the program itself, so that there are no threads yet, and it may be a container's PID 1
        return beside_first_process(lambda: _run(sys.argv[1:]))
    return _run(argv)


def _run(argv: Sequence[str]) -> int:
    try:
        # Loading torch takes seconds, in which Ctrl-C is as good an end as later.
        from launcher.routes import run_command_line

        return run_command_line(argv)
    except KeyboardInterrupt:
        print("etc-run: interrupted", file=sys.stderr)
        return 130


def __getattr__(name: str) -> Any:
    if name in _OURS:
        return getattr(import_module("launcher.torchrun_names"), name)
    torchs = None if name.startswith("_") else getattr(import_module("torch.distributed.run"), name, None)
    if torchs is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return torchs


if __name__ == "__main__":
    sys.exit(main())
