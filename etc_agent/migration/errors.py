"""What can go wrong while state moves."""

from __future__ import annotations

from etc_agent.errors import EtcError


class MigrationError(EtcError):
    """State could not be moved. The message names the worker and, where there is one, the tensor and its box."""
