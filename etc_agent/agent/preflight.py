"""A user's command that must pass before this node joins: a look at the GPUs, the network, a mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from etc_agent.agent.settings import UserCommand
from etc_agent.errors import EtcError


def check_node(preflight: UserCommand, environment: Mapping[str, str]) -> None:
    """Run the command; its output goes to standard error.

    Raises:
        EtcError: it fails, takes longer than `preflight.timeout_s`, or cannot be run.
    """
    command = " ".join(preflight.words)
    try:
        done = subprocess.run(
            preflight.words, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=preflight.timeout_s, start_new_session=True,
        )
    except OSError as error:
        raise EtcError(f"the preflight command cannot be run: {command}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise EtcError(
            f"the preflight command has not ended in {preflight.timeout_s:g} s: {command}; this node does not join"
        ) from None
    if done.returncode:
        lines = done.stdout.strip().splitlines()
        said = f": {lines[-1]}" if lines else ""
        raise EtcError(
            f"the preflight command failed with exit code {done.returncode}: {command}{said}; this node does not join"
        )
