"""The settings of one `etc-run`: command line, environment and job file, already merged and checked.

`launcher.job` and `launcher.merge` build a `JobSettings`; the agent only reads it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from etc_agent.control.checkpoint_settings import Checkpoint
from etc_agent.control.redundancy import Redundancy
from etc_agent.parallel.config import ParallelConfig
from etc_agent.rendezvous.ports import ANY_PORT, PortRange


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """Where etcd is, and the credentials to use.

    `endpoints`: ``host:port`` or ``https://host:port``, tried in turn; empty only with ``--standalone``, where the
    agent starts a private etcd. `prefix`: all keys are under ``<prefix>/<run_id>/``. `ca_file`, `cert_file`,
    `key_file`: PEM files; `ca_file` alone enables TLS. `password` is left out of the repr, and so out of logs.
    """

    endpoints: tuple[str, ...] = ()
    prefix: str = "/etc-run"
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The longest duration of each wait, in seconds.

    `lease_s`: a silent node is considered lost after this. `settle_s`: how long the set of nodes must be unchanged
    before nodes that joined are used. `join_s`: until the minimum number of nodes is present, at the start or after a
    loss. `start_s`: until a new worker process has sent Hello. `prepare_s`: until all workers have prepared a proposed
    generation. `switch_s`: from *armed* until the last worker has switched. `drain_s`: until a draining node has handed
    over its state, where no deadline is given. `hang_s`: a node on which no step completes for this long is hung; 0:
    never. `shutdown_grace_s`: between SIGTERM and SIGKILL of a worker. `etcd_s`: one request to etcd, retries included.
    `end_s`: until etcd answers after all workers of this node have finished; then the node ends by itself. `retry_s`:
    before a change is tried again that failed for a reason that may pass; doubled at each further failure. `freeze_s`:
    until a worker that survives a loss has answered that it is frozen; then it is ended, and counts as lost too.
    """

    lease_s: float = 10.0
    settle_s: float = 1.0
    join_s: float = 900.0
    start_s: float = 120.0
    prepare_s: float = 300.0
    switch_s: float = 1800.0
    drain_s: float = 300.0
    hang_s: float = 1800.0
    shutdown_grace_s: float = 30.0
    etcd_s: float = 5.0
    end_s: float = 30.0
    retry_s: float = 10.0
    freeze_s: float = 10.0


@dataclass(frozen=True, slots=True)
class UserCommand:
    """A user's program and its arguments, which may run for `timeout_s` seconds."""

    words: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Preemption:
    """How this node learns that it is about to be taken away: `probe` is run every `every_s` seconds and exits with 0
    once that is so. `grace_s`: seconds to hand over the node's state; None for ``timeouts.drain_s``."""

    probe: UserCommand
    every_s: float = 5.0
    grace_s: float | None = None


class Spares(StrEnum):
    """Which warm spares a node keeps: none, one in each idle slot, or one more, which takes the slot of any worker that
    dies."""

    COLD = "cold"
    WARM = "warm"
    RESERVE = "reserve"


@dataclass(frozen=True, slots=True)
class Failures:
    """What follows from the failures of workers. `replaces_raised`: a worker that raises an error of its own is handled
    in place like one that was killed, within the restart budget. `max_per_window`: a slot or node whose workers fail
    this many times within `window_s` seconds is cordoned; 0: never."""

    replaces_raised: bool = False
    max_per_window: int = 3
    window_s: float = 600.0


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """What this node's agent tells to the outside; nothing where None.

    `metrics`: (host, port) that serves /metrics, /healthz and /readyz; port 0: any free one. `events`: the file to
    which events are appended. `left_exit_code`: of a node that leaves because its scheduler takes it away. `verdict`:
    the file that says how etc-run has ended here (`agent.telemetry.verdict`).
    """

    metrics: tuple[str, int] | None = None
    events: Path | None = None
    verdict: Path | None = None
    left_exit_code: int = 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of the model that limit its parallel configs. None: not given, not checked."""

    layers: int | None = None
    heads: int | None = None
    hidden: int | None = None

    def refusal(self, config: ParallelConfig) -> str | None:
        """Why the model cannot run under `config`, in one line; None where these sizes allow it."""
        if self.layers is not None and config.pp > self.layers:
            return f"{self.layers} layers cannot fill pp={config.pp} stages; choose pp up to {self.layers}"
        for name, size in (("heads", self.heads), ("hidden units", self.hidden)):
            if size is not None and size % config.tp:
                return f"{size} {name} cannot be divided over tp={config.tp}; choose tp from {_divisors(size)}"
        return None


def _divisors(number: int, show: int = 8) -> str:
    found = [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
    return ", ".join(found if len(found) <= show else [*found[:show], "..."])


@dataclass(frozen=True, slots=True)
class JobSettings:
    """The settings of one job on one node. Other nodes may have other arguments, slots and roles.

    `entrypoint`, `args`: as torchrun's `config_from_args` yields them; `entrypoint` is an executable, or a function
    under ``--run-path`` and `launcher.elastic_launch`. `launch_config` is torchrun's `LaunchConfig` of the same
    arguments (LogsSpecs, start method, NUMA binding, signals, log filters ...), typed Any because this module
    imports no torch. `num_slots`: workers on this node. `standalone`: this node is the whole job and starts its own
    etcd. `parallel`: the config of generation 1, None to let the planner choose. `allowed`: the only configs that
    may be chosen, None for any. `pack`: prefer few nodes over few bytes; None means when the job shrinks.
    `node_rank`: only where the user gave one. `alike_failures`: this many equal failures before the first step end the
    job; 0: never. `failures`: see `Failures`. `spares`: which warm spares are kept. `redundancy`: of the
    workers' state. `checkpoint`: what sessions write in case that all workers have to start afresh. `preflight`: a
    command that must succeed before this node joins. `forward_signals`: signals that are forwarded to the workers.
    `port_range`: where this node's agent listens. `env`: added to every worker's environment. `telemetry`: what this
    node tells to the outside.
    """

    entrypoint: str | Callable[..., Any]
    args: tuple[Any, ...]
    launch_config: Any
    run_id: str
    min_nodes: int
    max_nodes: int
    num_slots: int
    local_addr: str | None = None
    node_rank: int | None = None
    standalone: bool = False
    etcd: EtcdSettings = field(default_factory=EtcdSettings)
    parallel: ParallelConfig | None = None
    allowed: tuple[ParallelConfig, ...] | None = None
    pack: bool | None = None
    model: ModelFacts = field(default_factory=ModelFacts)
    global_batch: int | None = None
    max_restarts: int = 0
    alike_failures: int = 0
    failures: Failures = field(default_factory=Failures)
    spares: Spares = Spares.WARM
    redundancy: Redundancy = field(default_factory=Redundancy)
    preflight: UserCommand | None = None
    preemption: Preemption | None = None
    forward_signals: tuple[signal.Signals, ...] = ()
    port_range: PortRange = ANY_PORT
    monitor_interval_s: float = 0.1
    timeouts: Timeouts = field(default_factory=Timeouts)
    checkpoint: Checkpoint | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)

    def refusal(self, config: ParallelConfig) -> str | None:
        """Why this job can never run under `config`, with any nodes; None where it may."""
        return config_refusal(config, allowed=self.allowed, model=self.model, global_batch=self.global_batch)

    def refusal_here(self, config: ParallelConfig) -> str | None:
        """The same for this node alone as the whole job: the slots of other nodes are not known yet."""
        if self.max_nodes == 1 and config.num_ranks > self.num_slots:
            return f"{config} needs {config.num_ranks} workers, the job admits {self.num_slots} (on its one node)"
        return self.refusal(config)


def config_refusal(
    config: ParallelConfig,
    *,
    allowed: tuple[ParallelConfig, ...] | None,
    model: ModelFacts,
    global_batch: int | None,
) -> str | None:
    """Why a job with these rules can never run under `config`, in one line; None where it may."""
    if allowed is not None and config not in allowed:
        return f"{config} is not among the allowed configs: {', '.join(map(str, allowed))}"
    if (reason := model.refusal(config)) is not None:
        return f"{config}: {reason}"
    if global_batch is not None and global_batch % config.dp:
        return (
            f"{config}: a global batch of {global_batch} cannot be divided over dp={config.dp}; "
            f"choose dp from {_divisors(global_batch)}"
        )
    return None
