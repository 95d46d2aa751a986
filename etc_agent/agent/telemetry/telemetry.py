"""What an agent tells to the outside while it runs: metrics and events, both only where they were asked for."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Self

from etc_agent.agent.safety.signals import SignalReceived
from etc_agent.agent.settings import TelemetrySettings
from etc_agent.agent.telemetry.event_log import EventLog, agent_ended, agent_started
from etc_agent.agent.telemetry.events import Moment
from etc_agent.agent.telemetry.exporter import Exporter
from etc_agent.agent.telemetry.facts import NodeFacts
from etc_agent.errors import one_line
from etc_agent.reconfig.known.observing import JobRecords
from etc_agent.version import version

logger = logging.getLogger(__name__)


class Telemetry:
    """Opens what `settings` ask for at once, so that a mistake in them ends the agent before it joins. As a context
    manager, it tells of the error by which the agent ends, too.

    Raises:
        EtcError: a port cannot be listened at, or a file cannot be opened.
    """

    def __init__(self, settings: TelemetrySettings, run_id: str, node: str) -> None:
        self._exporter = Exporter(*settings.metrics) if settings.metrics else None
        self._log: EventLog | None = None
        try:
            if settings.events is not None:
                self._log = EventLog(settings.events, run_id, node)
                self._log.write(agent_started(version()))
            if self._exporter is not None and settings.metrics is not None:
                logger.info("metrics at http://%s/metrics", self._exporter.address)
        except BaseException:
            self.close()
            raise

    def observe(self, records: JobRecords, facts: NodeFacts) -> None:
        """Show these from now on, and write down what has changed. Called once a turn of the agent's loop."""
        if self._exporter is not None:
            self._exporter.observe(records, facts)
        if self._log is not None:
            self._log.observe(Moment(records, facts))

    def ended(self, exit_code: int, why: str) -> None:
        """Write down how the agent ends."""
        if self._log is not None:
            self._log.write(agent_ended(exit_code, why))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.ended(128 + error.number if isinstance(error, SignalReceived) else 1, one_line(error))
        self.close()

    def close(self) -> None:
        if self._exporter is not None:
            self._exporter.close()
        if self._log is not None:
            self._log.close()
