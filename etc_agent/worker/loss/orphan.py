"""A worker whose agent is gone ends itself.

The agent's guardian ends the workers of a dead agent within moments. If the guardian has been killed too, nobody else
would: the other nodes wait for the end of the lease, take the worker for gone, and train on beside it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

_log = logging.getLogger(__name__)

_PATIENCE_S = 3.0
"""Longer than a guardian takes, so that it is normally the one who does this; far shorter than a lease."""


class Orphan:
    """Ends this process when the agent has closed the connection, unless the session is closed meanwhile."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def close(self) -> None:
        """The session ends in order."""
        self._closed.set()

    def agent_gone(self) -> None:
        """Called on the control thread: the agent has closed the connection."""
        if self._closed.wait(_PATIENCE_S):
            return
        _log.error("the agent is gone and nobody has ended this worker for %g s; it ends itself, since other nodes may "
                   "continue without it", _PATIENCE_S)
        sys.stdout.flush()
        sys.stderr.flush()
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # its children too, as the guardian does
        os._exit(1)
