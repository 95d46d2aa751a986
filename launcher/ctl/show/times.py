"""Times as people type and read them."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

import click

from launcher.ctl.exits import CtlError, Exit

_AGO = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Since(click.ParamType):
    """``10m`` (s, m, h or d) ago, a local date (``2026-12-01``, ``2026-12-01T10:00``), or seconds since 1970."""

    name = "since"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        if match := _AGO.fullmatch(text):
            return time.time() - float(match[1]) * _SECONDS[match[2]]
        try:
            return float(text)
        except ValueError:
            pass
        try:
            return datetime.fromisoformat(text).timestamp()
        except ValueError:
            raise CtlError(
                Exit.MISTAKE, f"--since: {text!r} is no time; write 10m, 2h, 3d, 2026-12-01 or 2026-12-01T10:00"
            ) from None


def when(seconds: float) -> str:
    """Local time of day and date of a time stamp; empty for 0, which stands for unknown."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else ""


def ago(seconds: float, now: float) -> str:
    """How long ago a time stamp was: ``5 min ago``; empty for 0, which stands for unknown."""
    return f"{length(max(0.0, now - seconds))} ago" if seconds else ""


def length(seconds: float) -> str:
    """A length of time in its two largest units: ``35 s``, ``5 min``, ``2 h 3 min``, ``4 d 1 h``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min"
    larger, smaller = ((86400, "d"), (3600, "h")) if seconds >= 86400 else ((3600, "h"), (60, "min"))
    rest = seconds % larger[0] // smaller[0]
    return f"{seconds // larger[0]:.0f} {larger[1]}" + (f" {rest:.0f} {smaller[1]}" if rest else "")
