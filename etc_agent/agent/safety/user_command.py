"""Runs a user's command beside a job, and ends everything that the command has started."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping

from etc_agent.agent.safety.guardian import Guardian
from etc_agent.agent.settings import UserCommand


def run_command(command: UserCommand, environment: Mapping[str, str], guardian: Guardian) -> tuple[int, str]:
    """The command's exit code, and what it wrote to standard output and error. Its child processes end with it, or when
    the agent is gone. `environment` is added to the agent's.

    Raises:
        OSError: it cannot be run.
        subprocess.TimeoutExpired: it took longer than ``command.timeout_s``.
    """
    # Not a pipe: a child that survives the command would keep it open.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command.words, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )
        guardian.watch_group(process.pid)
        try:
            exit_code = process.wait(command.timeout_s)
        finally:
            _kill_group(process.pid)
            process.wait()
            guardian.forget_group(process.pid)
        output.seek(0)
        return exit_code, output.read().decode(errors="replace")


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
