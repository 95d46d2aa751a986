"""Appends events to a file, a JSON object a line."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

from etc_agent.agent.telemetry.events import Event, EventKind, Moment, events_between
from etc_agent.errors import EtcError

logger = logging.getLogger(__name__)


class EventLog:
    """Opens the file at once. Every line is written by one call, so that agents on one host may share a file. `node`:
    the name that this node asks for; the one that it has got is known with the first moment.

    Raises:
        EtcError: the file cannot be opened.
    """

    def __init__(self, path: Path, run_id: str, node: str) -> None:
        self._path = path
        self._run_id, self._node = run_id, node
        self._seen: Moment | None = None
        self._has_failed = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise EtcError(f"--events: {path} cannot be written: {error.strerror}") from None

    def observe(self, moment: Moment) -> None:
        """Write what has happened since the last call; nothing at the first one, whose moment is the beginning."""
        before, self._seen, self._node = self._seen, moment, moment.facts.node
        if before is not None:
            for event in events_between(before, moment):
                self.write(event)

    def write(self, event: Event) -> None:
        """Append one line. A file that cannot be written, such as on a full disk, is said once and stops nothing."""
        common = {"time": round(time.time(), 3), "run_id": self._run_id, "node": self._node, "event": event.kind}
        try:
            os.write(self._file, json.dumps({**common, **event.fields}).encode() + b"\n")
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                logger.warning("--events: %s cannot be written, and events are missing: %s", self._path, error.strerror)
            self._has_failed = True

    def close(self) -> None:
        os.close(self._file)


def agent_started(version: str) -> Event:
    return Event(EventKind.AGENT_STARTED, {"version": version, "pid": os.getpid()})


def agent_ended(exit_code: int, why: str) -> Event:
    return Event(EventKind.AGENT_ENDED, {"exit_code": exit_code, "why": why})
