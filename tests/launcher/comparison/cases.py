"""Command lines that both launchers run, and every difference that may be seen, with its reason."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Aspect(StrEnum):
    """What is compared."""

    ENVIRONMENT = "environment"
    ARGUMENTS = "arguments"
    STDOUT = "stdout"
    STDERR = "stderr"
    LOGS = "log files"
    ERRORS = "error files"
    EVENTS = "events"
    EXIT = "exit code"


@dataclass(frozen=True, slots=True)
class Case:
    """One command line: `options` of the launcher, then what probe.py is told.

    `program`: what stands in for the training script; ``PROBE`` is probe.py, ``FOLDER`` where it reports.
    `environment`: on top of the caller's. `send`: the signal that the launcher gets once every worker is ready.
    `differs`: aspect -> key of `DIFFERENCES`, for every aspect that may differ.
    """

    name: str
    options: tuple[str, ...]
    action: str = "say hello"
    program: tuple[str, ...] = ("PROBE", "FOLDER")
    environment: Mapping[str, str] = field(default_factory=dict)
    send: signal.Signals | None = None
    differs: Mapping[Aspect, str] = field(default_factory=dict)


TWO = ("--nproc-per-node", "2")
EXIT = {Aspect.EXIT: "exit-code"}
SIGNAL = {Aspect.EXIT: "signal-exit", Aspect.ERRORS: "own-error"}

CASES = (
    Case("two workers", TWO, "say hello --flag a=b"),
    Case("PET_ variables", (), environment={"PET_NPROC_PER_NODE": "2", "PET_REDIRECTS": "1", "PET_LOG_DIR": "LOGS"}),
    Case(
        "role, restarts, interval, thread count, file timer",
        (*TWO, "--role", "trainer", "--max-restarts", "2", "--monitor-interval", "0.2"),
        environment={"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "OMP_NUM_THREADS": "3"},
    ),
    Case(
        "virtual local rank", (*TWO, "--virtual-local-rank"), environment={"CUDA_VISIBLE_DEVICES": "3, 5"},
    ),
    Case("virtual local rank, all devices", (*TWO, "--virtual-local-rank")),
    Case("redirects", (*TWO, "-r", "0:1,1:3", "--log-dir", "LOGS")),
    Case(
        "tee, rank filter, line filters",
        (*TWO, "-t", "3", "--local-ranks-filter", "1", "--log-dir", "LOGS", "--duplicate-stdout-filters", "apple",
         "--duplicate-stderr-filters", "apple"),
        "say apple pear", differs={Aspect.LOGS: "filtered-logs"},
    ),
    Case(
        "line prefix template", (*TWO, "-t", "1"),
        environment={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${role_name}/${rank}/${local_rank}] "},
    ),
    Case("the user's own logs specs", (*TWO, "--logs-specs", "aside", "-r", "3", "--log-dir", "LOGS")),
    Case(
        "local rank above 9", (*TWO, "-r", "10:3,1:1", "--log-dir", "LOGS"),
        differs=dict.fromkeys(Aspect, "long-ranks"),
    ),
    Case("module", (*TWO, "-m"), program=("probe", "FOLDER")),
    Case(
        "no python", (*TWO, "--no-python"),
        program=("/bin/sh", "-c", 'exec "$PYTHON" "$@"', "local rank ${local_rank}", "PROBE", "FOLDER"),
    ),
    Case("run path, spawn", ("--run-path", "--start-method", "spawn")),
    Case("run path, fork", (*TWO, "--run-path", "--start-method", "fork")),
    Case("run path, forkserver", ("--run-path", "--start-method", "forkserver")),
    Case("events", (*TWO, "--event-log-handler", "console"), differs={Aspect.EVENTS: "events"}),
    Case("a worker exits with 42", TWO, "exit 42", differs=EXIT),
    Case("a worker is killed", TWO, "kill", differs=EXIT),
    Case("a worker raises under @record", (*TWO, "--log-dir", "LOGS"), "raise"),
    Case("recovers after two failures", (*TWO, "--max-restarts", "2", "-r", "3", "--log-dir", "LOGS"), "recover 2"),
    Case("restarts used up", (*TWO, "--max-restarts", "1", "-r", "3", "--log-dir", "LOGS"), "exit 5", differs=EXIT),
    Case("SIGTERM to the launcher", TWO, "signals", send=signal.SIGTERM, differs=SIGNAL),
    Case("SIGINT to the launcher", TWO, "signals", send=signal.SIGINT, differs=SIGNAL),
    Case(
        "SIGUSR1, told to handle it", (*TWO, "--signals-to-handle", "SIGTERM,SIGUSR1"), "signals",
        send=signal.SIGUSR1, differs=SIGNAL,
    ),
    Case(
        "a deaf worker, one second to shut down", (*TWO, "--shutdown-timeout", "1"), "deaf", send=signal.SIGTERM,
        differs=SIGNAL,
    ),
    Case(
        "no such number of workers", ("--nproc-per-node", "two"),
        differs={Aspect.EXIT: "usage", Aspect.ERRORS: "own-error"},
    ),
    Case("no such option", ("--no-such",)),
)

# Variables whose values are of their run, and those that only our workers have.
OWN_VALUES = {
    "MASTER_ADDR": "ours gives the node's address, torchrun the name `localhost`",
    "MASTER_PORT": "a free port",
    "TORCHELASTIC_RUN_ID": "made up for each run",
    "TORCHELASTIC_ERROR_FILE": "where the log folder is (see log files)",
    "TORCHELASTIC_TIMER_FILE": "a new pipe for each run",
    "PYTHONPATH": "ours ends in one folder more (see init_process_group above)",
    "_": "the launcher's path, set by the shell",
    "LC_CTYPE": "set by Python itself",
}
OWN_NAMES = ("ETC_",)

DIFFERENCES = {
    "log-folders": (
        "Logs lie in `<log dir>/<run id>/generation_<g>/<node>/<rank>/`, torchrun's in `<log dir>/<run id>_<random>/"
        "attempt_<n>/<local rank>/`: nothing is deleted when the membership changes, and nodes may share a folder. The "
        "table compares the files after this renaming."
    ),
    "filtered-logs": (
        "`filtered_stdout.log` and `filtered_stderr.log` lie beside each worker's other logs, since workers come and "
        "go one by one; torchrun has one of each per attempt."
    ),
    "console": (
        "What the launcher itself says on standard error: one line for each change of the job, where torchrun prints "
        "warnings and a table of failures. The table compares what the workers say."
    ),
    "exit-code": "The exit code is the worker's own (128 + signal where one ended it); torchrun's is 1.",
    "signal-exit": "A job that was stopped by a signal exits with 128 + signal; torchrun exits with 1 and a traceback.",
    "usage": "What cannot be run exits with 2 and one line; torchrun exits with 1 and a traceback.",
    "own-error": (
        "What the launcher writes into its own TORCHELASTIC_ERROR_FILE about itself is in its own words. The cause of "
        "a failed job is the worker's, under both."
    ),
    "long-ranks": "`-r 10:3` and `-t 10:3` work; torchrun refuses local ranks above 9.",
    "events": (
        "The end of a worker is recorded when it ends, so also before a restart; torchrun records it once, at the end "
        "of the job. `ASSIGN_WORKER_RANKS` is not recorded: ranks come with the generation."
    ),
}
