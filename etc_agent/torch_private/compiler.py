"""torch.compile's limits on how often one function is compiled."""

from __future__ import annotations

import sys
from typing import Final

from etc_agent.torch_private.imports import COMPILER

NAMES = ("torch._dynamo.config.recompile_limit", "torch._dynamo.config.accumulated_recompile_limit")

_LIMITS: Final = ("recompile_limit", "accumulated_recompile_limit")
_before: Final[dict[str, int]] = {}
"""The limits before the first change."""


def allow_recompilations() -> None:
    """Let every function be compiled as often again as the limits allowed at first. Beyond the limit torch goes on
    without compiling, and graphs of generations that are gone count, too."""
    if COMPILER not in sys.modules:
        return
    config = sys.modules[COMPILER].config
    for name in _LIMITS:
        limit = getattr(config, name)
        setattr(config, name, limit + _before.setdefault(name, limit))
