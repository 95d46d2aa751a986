"""torchelastic's parsers and tables behind the options of torchrun, so that the same text means the same here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.events.handlers import _log_handlers
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

NAMES = (
    "torch.distributed.elastic.events.handlers._log_handlers",
    "torch.distributed.elastic.rendezvous.utils._parse_rendezvous_config",
)


def event_handlers() -> Mapping[str, Any]:
    """What ``--event-log-handler`` can name."""
    return _log_handlers


def parse_rendezvous_config(text: str) -> dict[str, str]:
    """``--rdzv-conf``: ``key=value,key=value``.

    Raises:
        ValueError: the text is not of this form.
    """
    return _parse_rendezvous_config(text)
