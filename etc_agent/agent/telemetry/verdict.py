"""The verdict file: how and why etc-run has ended on a node, for schedulers that hide exit codes.

It is written when etc-run begins, so that whoever finds ``running`` in it after the end knows that etc-run was killed,
and once more at the end. Each time it is replaced as a whole, so that no reader finds half of it; only what cannot be
replaced, such as a file that a container engine has mounted for it, is written in place.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from etc_agent.agent.ending import Ending
from etc_agent.agent.job_end import JobEnd
from etc_agent.errors import EtcError, one_line

logger = logging.getLogger(__name__)

RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`outcome`: an `Ending`, or `RUNNING`. `exit_code`: None while it runs. `why`: one line. `start_again`: whether
    the same command may get further than this one has. `step`: the first step that has not been completed; None where
    no steps are known. `checkpoint`: the step from which the newest checkpoint of the job file's folder goes on; None
    where there is none: then the script's own decides.
    """

    run_id: str
    outcome: str
    exit_code: int | None
    why: str
    start_again: bool
    step: int | None = None
    checkpoint: int | None = None

    @classmethod
    def of(cls, run_id: str, end: JobEnd, checkpoint: int | None = None) -> Verdict:
        return cls(run_id, end.ending, end.exit_code, end.why, end.start_again, end.step, checkpoint)

    @classmethod
    def refused(cls, run_id: str, error: Exception, exit_code: int, *, start_again: bool) -> Verdict:
        return cls(run_id, Ending.REFUSED, exit_code, one_line(error), start_again)


def running(run_id: str) -> Verdict:
    """What is true until the end; read after it, it says that etc-run could not write any more."""
    return Verdict(run_id, RUNNING, None, "etc-run is running, or was killed (SIGKILL, out of memory)", True)


def begin(path: Path, run_id: str) -> None:
    """Write that the job is running.

    Raises:
        EtcError: the file cannot be written.
    """
    try:
        _replace(path, running(run_id))
    except OSError as error:
        raise EtcError(f"--verdict: {path} cannot be written: {error.strerror}") from None


def write(path: Path | None, verdict: Verdict) -> None:
    """Replace the file, if there is to be one. That it cannot be written is logged: the exit code is still right."""
    if path is None:
        return
    try:
        _replace(path, verdict)
    except OSError as error:
        logger.error("--verdict: %s cannot be written: %s", path, error.strerror)


def _replace(path: Path, verdict: Verdict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**asdict(verdict), "time": round(time.time(), 3)}, indent=1) + "\n"
    if path.exists() and not (path.is_file() and os.access(path.parent, os.W_OK)):
        path.write_text(text)
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        path.write_text(text)
    finally:
        draft.unlink(missing_ok=True)
