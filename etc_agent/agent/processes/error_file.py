"""torchelastic's error files: those of workers, which torch's ``@record`` writes, and the launcher's own: a scheduler
that sets TORCHELASTIC_ERROR_FILE for torchrun finds the cause there."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from etc_agent.control.causes import kind_in_text
from etc_agent.control.messages import Raised

_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def read(file: str) -> Raised | None:
    """What a worker's error file says; None where there is none, or something else than torch writes."""
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


def pass_on(error_file: Path | None, exit_code: int) -> None:
    """Copy the error file of the worker that made the job fail with `exit_code`, where it has left one."""
    if error_file is not None and os.environ.get(_VARIABLE):
        get_error_handler().dump_error_file(str(error_file), exit_code)


def write_own(error: Exception) -> None:
    """Say why the launcher itself ends: it was stopped, or what it was asked for cannot be."""
    if os.environ.get(_VARIABLE):
        get_error_handler().record_exception(error)
