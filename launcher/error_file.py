"""The launcher's own error file: a scheduler that sets TORCHELASTIC_ERROR_FILE for torchrun finds the cause there."""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from etc_agent.agent.job_end import JobEnd
from etc_agent.agent.safety.signals import SignalReceived

_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def write_end(end: JobEnd) -> None:
    """Say why the job has ended: by a signal to the launcher, or with the error file of the worker that made it fail,
    where that has left one."""
    cause = next(iter(end.failures.values()), None)
    if end.stopped_by is not None:
        write_error(SignalReceived(end.stopped_by))
    elif end.exit_code and cause is not None and os.environ.get(_VARIABLE) and Path(cause.error_file).is_file():
        get_error_handler().dump_error_file(cause.error_file, end.exit_code)


def write_error(error: Exception) -> None:
    """Say why the launcher itself ends: what it was asked for cannot be."""
    if os.environ.get(_VARIABLE):
        get_error_handler().record_exception(error)
