"""The preemption probe: a user's command that tells whether this node is about to be taken away (exit code 0: yes),
such as ``curl -sf`` of a cloud's metadata address."""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Callable

from etc_agent.agent.safety.guardian import Guardian
from etc_agent.agent.safety.user_command import run_command
from etc_agent.agent.settings import UserCommand

logger = logging.getLogger(__name__)


class PreemptionProbe:
    """Runs the command every `every_s` until it says yes; then calls `on_notice` once, from this thread."""

    def __init__(
        self, command: UserCommand, every_s: float, on_notice: Callable[[], None], guardian: Guardian
    ) -> None:
        self._command, self._every_s, self._on_notice, self._guardian = command, every_s, on_notice, guardian
        self._closed = threading.Event()
        self._complaint = ""
        threading.Thread(target=self._run, name="preemption-probe", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                if self._says_yes():
                    self._on_notice()
                    return
                self._closed.wait(self._every_s)
        except RuntimeError:
            if not self._closed.is_set():  # else the guardian was closed normally, and ended the command
                raise

    def _says_yes(self) -> bool:
        try:
            exit_code, _ = run_command(self._command, {}, self._guardian)
        except OSError as error:
            self._complain(f"cannot be run: {error.strerror}")
        except subprocess.TimeoutExpired:
            self._complain(f"has not ended in {self._command.timeout_s:g} s")
        else:
            return exit_code == 0
        return False

    def _complain(self, what: str) -> None:
        """Log `what`, unless it was the last thing logged."""
        if what != self._complaint:
            logger.warning("the preemption probe %s: %s", what, " ".join(self._command.words))
        self._complaint = what
