"""etc-ctl: look at running jobs, and ask them to change. It reads and writes the keys that ``etcdctl`` would.

A command is a function in `commands`, one small file for each group, and is added to the list in `main`. All read a job
through `jobs`, find it through `options`, and show what they have found through `output`, as text or as JSON.
"""

from __future__ import annotations


def main() -> int:
    """Run the command line that was typed; the exit code."""
    from launcher.ctl.main import run

    return run()
