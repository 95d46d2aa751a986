"""Failures of a switch after which the job cannot continue in the previous generation."""

from __future__ import annotations

from etc_agent.errors import EtcError, PeerLostError


class SwitchError(PeerLostError):
    """A worker was lost during a switch. Whether the others have switched is not known on this worker."""


class StateLostError(EtcError):
    """A switch in `release` mode failed after it had begun: neither generation's state is complete."""
