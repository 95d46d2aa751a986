"""The preflight check: a user's command that must succeed before this node joins, to check GPUs, network or mounts."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from etc_agent.agent.safety.guardian import Guardian
from etc_agent.agent.safety.user_command import run_command
from etc_agent.agent.settings import UserCommand
from etc_agent.errors import EtcError


def check_node(preflight: UserCommand, environment: Mapping[str, str], guardian: Guardian) -> None:
    """Run the command, with `environment` added to the agent's own.

    Raises:
        EtcError: it fails (the message shows its last line), takes longer than `preflight.timeout_s`, or cannot be run.
    """
    command = " ".join(preflight.words)
    try:
        exit_code, output = run_command(preflight, environment, guardian)
    except OSError as error:
        why = f"the preflight command cannot be run: {command}: {error.strerror}"
        raise EtcError(f"{why}; this node does not join") from None
    except subprocess.TimeoutExpired:
        raise EtcError(
            f"the preflight command has not ended in {preflight.timeout_s:g} s: {command}; this node does not join"
        ) from None
    if exit_code:
        lines = output.strip().splitlines()
        said = f": {lines[-1]}" if lines else ""
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"failed with exit code {exit_code}"
        raise EtcError(f"the preflight command {how}: {command}{said}; this node does not join")
