"""The error file of a worker, which torch's ``@record`` writes."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from etc_agent.control.causes import kind_in_text
from etc_agent.control.messages import Raised

logger = logging.getLogger(__name__)


def read(file: str) -> Raised | None:
    """The contents of a worker's error file; None where there is none, or where it is not in torch's format."""
    try:
        message = json.loads(Path(file).read_text(errors="replace"))["message"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(message, dict | str):
        return None
    details = message if isinstance(message, dict) else {"message": message}
    lines = str(details.get("message", "")).strip().splitlines()
    extra = details.get("extraInfo")
    callstack = str(extra.get("py_callstack", "")) if isinstance(extra, dict) else ""
    return Raised(lines[0], kind_in_text(callstack)) if lines else None


def set_aside(file: str) -> None:
    """Rename an error file that torch cannot read; it stays in the same folder."""
    path = Path(file)
    if path.is_file():
        kept = path.rename(path.with_name(f"{path.name}.unreadable"))
        logger.warning("a worker's error file is not in the format of torch's @record; it was renamed to %s", kept)
