"""The launcher's own error file: a scheduler that sets TORCHELASTIC_ERROR_FILE for torchrun finds the cause there."""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def pass_on(error_file: Path | None, exit_code: int) -> None:
    """Copy the error file of the worker that made the job fail with `exit_code`, where it has left one."""
    if error_file is not None and os.environ.get(_VARIABLE):
        get_error_handler().dump_error_file(str(error_file), exit_code)


def write_own(error: Exception) -> None:
    """Say why the launcher itself ends: it was stopped, or what it was asked for cannot be."""
    if os.environ.get(_VARIABLE):
        get_error_handler().record_exception(error)
