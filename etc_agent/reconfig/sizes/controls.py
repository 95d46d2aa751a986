"""What administrators write below ``control/`` besides sizes and drains: cordons, a pause, the order to stop.

Each value is JSON (``{"why": ..., "by": ..., "since": ...}``, as etc-ctl writes it) or plain text, as a person types
it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from etc_agent.parallel.topology import Slot

_YES = ("true", "1", "yes", "on")
_NO = ("", "false", "0", "no", "off")


@dataclass(frozen=True, slots=True)
class Order:
    """Why an administrator wants something, who it is, and since when (seconds since 1970); each may be unknown."""

    why: str = ""
    by: str = ""
    since: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {"why": self.why, "by": self.by, "since": self.since}

    def __str__(self) -> str:
        """For people: ``why (by whom)``, or what is known of it."""
        if not self.by:
            return self.why
        return f"{self.why} (by {self.by})" if self.why else f"by {self.by}"


@dataclass(frozen=True, slots=True)
class Cordon:
    """A node, or one slot of it, that takes no workers: ``control/cordon/<node>[/<local index>]``. `index`: None for
    the whole node."""

    node: str
    index: int | None = None
    order: Order = Order()

    def covers(self, slot: Slot) -> bool:
        """Whether `slot` must take no worker because of this cordon."""
        return slot.node == self.node and self.index in (None, slot.index)

    def __str__(self) -> str:
        return self.node if self.index is None else f"{self.node}/{self.index}"


def parse_cordon(name: str, value: str) -> Cordon:
    """A cordon from what follows ``control/cordon/`` in its key, and its value.

    Raises:
        ValueError: `name` is no node and no slot of one.
    """
    node, slash, index = name.partition("/")
    if not node or (slash and not index.isdecimal()):
        raise ValueError(f"{name!r} is not a node or a slot; write control/cordon/NODE or control/cordon/NODE/INDEX")
    return Cordon(node, int(index) if slash else None, parse_order(value))


def parse_order(value: str) -> Order:
    """The order in a value; plain text is the reason."""
    text = value.strip()
    try:
        fields = json.loads(text) if text.startswith("{") else {"why": text}
        return Order(str(fields.get("why", "")), str(fields.get("by", "")), float(fields.get("since", 0.0)))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return Order(text)


def parse_pause(value: str) -> Order | None:
    """The pause that a value of ``control/pause`` asks for; None where it says that there is none.

    Raises:
        ValueError: the value means neither yes nor no.
    """
    text = value.strip()
    if text.lower() in _NO:
        return None
    if text.lower() in _YES:
        return Order()
    order = parse_order(text) if text.startswith("{") else None
    if order is None or order.why == text:
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise ValueError(f"{shown!r} is neither true nor false, so nothing is paused; write true, or delete the key")
    return order
