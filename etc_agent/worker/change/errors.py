"""What can go wrong at a switch so that the job cannot go on in the previous generation."""

from __future__ import annotations

from etc_agent.errors import EtcError, PeerLostError


class SwitchError(PeerLostError):
    """A worker was lost while the job changed. Whether the others switched is not known here."""


class StateLostError(EtcError):
    """A switch in `release` mode failed after it had begun: neither generation's state is whole."""
