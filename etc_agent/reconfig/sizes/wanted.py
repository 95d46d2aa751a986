"""The values that an administrator can write to ``control/scale``, and the sizes that they mean."""

from __future__ import annotations

import json
from dataclasses import dataclass

from etc_agent.parallel.config import ParallelConfig


@dataclass(frozen=True, slots=True)
class Workers:
    """Exactly this number of workers."""

    count: int


@dataclass(frozen=True, slots=True)
class Nodes:
    """As many workers as fit on this number of nodes."""

    count: int


@dataclass(frozen=True, slots=True)
class Largest:
    """As many workers as the present nodes admit."""


Wanted = Workers | Nodes | ParallelConfig | Largest

_MOST = 10**9
_FORMS = (
    'a number of workers (8), nodes=4, max, a parallel config (PP2TP2DP1), '
    'or {"workers": 8}, {"nodes": 4}, {"config": "PP2TP2DP1"}'
)


def parse_wanted(text: str) -> Wanted:
    """Read a ``control/scale`` value. The empty text means the largest size.

    Raises:
        ValueError: one line that says what was given and which forms there are.
    """
    written = text.strip()
    try:
        if written in ("", "max"):
            return Largest()
        if written.startswith("{"):
            return _from_object(json.loads(written))
        if written.isdigit():
            return Workers(_positive(int(written)))
        if written.lower().startswith("nodes="):
            return Nodes(_positive(int(written[len("nodes=") :])))
        return ParallelConfig.parse(written)
    except (ValueError, TypeError, KeyError, RecursionError):
        shown = written if len(written) <= 80 else written[:77] + "..."
        raise ValueError(f"{shown!r} is not a size; write {_FORMS}") from None


def _from_object(value: dict[str, object]) -> Wanted:
    ((key, item),) = value.items()
    if key == "config":
        return ParallelConfig.parse(str(item))
    if isinstance(item, bool) or not isinstance(item, int):
        raise ValueError(item)
    if key not in ("workers", "nodes"):
        raise ValueError(key)
    return Workers(_positive(item)) if key == "workers" else Nodes(_positive(item))


def _positive(count: int) -> int:
    if not 1 <= count <= _MOST:
        raise ValueError(count)
    return count
