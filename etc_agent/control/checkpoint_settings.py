"""When a job writes checkpoints and where, as the job file, the environment or the script says it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from etc_agent.errors import EtcError

FOLDER_VARIABLE: Final = "ETC_CHECKPOINT"
STEPS_VARIABLE: Final = "ETC_CHECKPOINT_STEPS"
SECONDS_VARIABLE: Final = "ETC_CHECKPOINT_S"
KEEP_VARIABLE: Final = "ETC_CHECKPOINT_KEEP"
STOP_VARIABLE: Final = "ETC_CHECKPOINT_ON_STOP"

NAME: Final = re.compile(r"step-(\d+)")
"""The name of a complete checkpoint's folder, which it gets last of all, and in it the next step to run."""

DEFAULT_SECONDS: Final = 600.0
DEFAULT_KEEP: Final = 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`folder`: on a file system that all nodes share. `every_steps`, `every_s`: the interval in steps, in seconds, or
    whichever comes first; 0 for neither; `every_s` is 600 where neither is given. `keep`: how many complete checkpoints
    are left when one has been written. `on_stop_s`: where every node is told to leave, the longest that the job may
    take to write a last one; 0: it writes none, and stops at once.

    Raises:
        EtcError: a number is out of its range.
    """

    folder: str
    every_steps: int = 0
    every_s: float | None = None
    keep: int = DEFAULT_KEEP
    on_stop_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.folder:
            raise EtcError("checkpoint: the folder is empty; give a folder that all nodes share")
        if self.every_steps < 0 or not 0 <= self.interval_s < math.inf or not 0 <= self.on_stop_s < math.inf:
            raise EtcError(
                f"checkpoint: expected 0 or more, got every_steps={self.every_steps}, every_s={self.every_s}, "
                f"on_stop_s={self.on_stop_s}"
            )
        if self.keep < 1:
            raise EtcError(f"checkpoint: keep is {self.keep}; at least 1 has to be kept")

    @property
    def interval_s(self) -> float:
        """`every_s`, or its default; 0: no checkpoint is written because of the time."""
        if self.every_s is not None:
            return self.every_s
        return 0.0 if self.every_steps else DEFAULT_SECONDS

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Self | None:
        """What the environment says; None where it names no folder.

        Raises:
            EtcError: a variable is not of its form.
        """
        folder = environ.get(FOLDER_VARIABLE)
        if not folder:
            return None
        steps = int(_number(environ, STEPS_VARIABLE, 0))
        seconds = _number(environ, SECONDS_VARIABLE, 0) if environ.get(SECONDS_VARIABLE) else None
        keep, on_stop_s = int(_number(environ, KEEP_VARIABLE, DEFAULT_KEEP)), _number(environ, STOP_VARIABLE, 0)
        return cls(folder, steps, seconds, keep, on_stop_s)

    def variables(self) -> dict[str, str]:
        """The environment variables that `read` makes this of."""
        return {
            FOLDER_VARIABLE: self.folder,
            STEPS_VARIABLE: str(self.every_steps),
            SECONDS_VARIABLE: f"{self.interval_s:g}",
            KEEP_VARIABLE: str(self.keep),
            STOP_VARIABLE: f"{self.on_stop_s:g}",
        }


def newest_step(folder: str) -> int | None:
    """The step from which the newest checkpoint in `folder` goes on; None where there is none, or none can be seen."""
    try:
        steps = [int(match[1]) for name in os.listdir(folder) if (match := NAME.fullmatch(name))]
    except OSError:
        return None
    return max(steps, default=None)


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (name in (STEPS_VARIABLE, KEEP_VARIABLE) and not value.is_integer()):
        raise EtcError(f"{name}={text!r}: expected a number, 0 or more")
    return value
