"""etc-run: starts a training job as torchrun does, and changes its size while it trains."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from etc_agent.agent.safety.first_process import beside_first_process


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that is typed after the program's name; the exit code is the job's."""
    return beside_first_process(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    try:
        # Loading torch takes seconds, in which Ctrl-C is as good an end as later.
        from launcher.routes import run

        return run(argv)
    except KeyboardInterrupt:
        print("etc-run: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
