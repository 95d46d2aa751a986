"""How a job has ended on this node: for the shell, for Python callers, and for torchelastic's error files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from etc_agent.agent.ending import Ending


@dataclass(frozen=True, slots=True)
class JobEnd:
    """`exit_code`: for the shell; 0 where the job, or this node's part in it, has succeeded. `why`: one line.

    `stopped_by`: the signal that ended the job here, if any. `failures`: of this node's workers, by rank, the one that
    most likely caused the others first. `returned`: rank -> the return value of that worker's function, for this node's
    workers; None for each that runs a program. `ending`, `start_again`: as in `agent.ending.End`. `step`: the first
    step that has not been completed, where steps are known.
    """

    exit_code: int
    why: str = ""
    stopped_by: int | None = None
    failures: Mapping[int, ProcessFailure] = field(default_factory=dict)
    returned: Mapping[int, Any] = field(default_factory=dict)
    ending: Ending = Ending.STOPPED
    start_again: bool = False
    step: int | None = None
