"""The exit codes of etc-ctl, and the errors that end it with one of them. docs/operating.md has the table."""

from __future__ import annotations

from enum import IntEnum

from etc_agent.errors import EtcError


class Exit(IntEnum):
    """What etc-ctl ends with. `FAILED`: it was refused or went wrong in another way. `RESTARTED`: the job has the size,
    but all workers were restarted on the way. `NO_ANSWER`: what was waited for did not come in ``--timeout``."""

    DONE = 0
    FAILED = 1
    MISTAKE = 2
    RESTARTED = 3
    NOT_FOUND = 4
    NO_ANSWER = 5
    JOB_ENDED = 6
    NO_ETCD = 7


class CtlError(EtcError):
    """One line for the person who typed the command, and the exit code."""

    def __init__(self, exit_code: Exit, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code
