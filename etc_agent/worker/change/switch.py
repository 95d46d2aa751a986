"""The switch: at a safe point, from the previous generation to the prepared one. Training stands still here.

    host values -> refresh -> begin -> migrate -> take over, load -> vote: the commit point -> swap

In `keep` mode nothing of the previous generation is modified before the vote, so a failed vote, or losing a worker that
joins (`attempt`), costs only time. After the vote every worker is in the new generation, and workers that leave exit
once every other worker has seen the vote succeed. In `release` mode `begin` is a vote too, after which the switch
cannot be undone (`mode`).
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from etc_agent.adapters.choose import adapter_of
from etc_agent.control.causes import ErrorKind
from etc_agent.control.environment import generation_variables
from etc_agent.errors import EtcError, one_line
from etc_agent.integrations.host_state import rng_state, set_rng_state
from etc_agent.migration.progress import ProgressBar
from etc_agent.migration.report import MigrationReport
from etc_agent.migration.trace import write_trace
from etc_agent.worker.change.attempt import Attempt
from etc_agent.worker.change.errors import SwitchError
from etc_agent.worker.change.leave import tell_leavers, wait_for_all
from etc_agent.worker.change.phases import Phases
from etc_agent.worker.change.prepared import PreparedGeneration
from etc_agent.worker.change.state import host_values
from etc_agent.worker.change.state.holdings import Holdings
from etc_agent.worker.change.state.host_values import NO_VALUES, HostValues
from etc_agent.worker.change.state.rng import start_stream
from etc_agent.worker.change.state.shard_dumps import dump_shards
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.loss.latch import Latch
from etc_agent.worker.settings import Settings
from etc_agent.worker.vote import Vote
from etc_agent.worker.world.swap import activate, deactivate, entered

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Switch:
    """What has become of a switch. `is_committed`: the new generation is in force; otherwise the old one still is.

    `start`: when this worker knew that the switch had begun (`time.perf_counter`); `step`: the first step of the new
    generation. `report`: of the migration, None if it did not complete. `last_sends`: messages to workers that leave or
    join, to be waited for before the change's group is closed. `error`: why this worker voted against, "" if it did
    not; `kind`: of that error, or, if this worker has none, of another worker's.
    """

    step: int
    is_committed: bool = False
    start: float = field(default_factory=time.perf_counter)
    phases: Phases = field(default_factory=Phases)
    report: MigrationReport | None = None
    last_sends: list[dist.Work] = field(default_factory=list)
    error: str = ""
    kind: ErrorKind = ErrorKind.PEER_LOST


def switch(
    prepared: PreparedGeneration, live: LiveGeneration | None, old_vote: Vote | None, latch: Latch, outcome: Switch,
    settings: Settings,
) -> None:
    """Switch to `prepared`; `outcome` is filled in. `live`: the generation in force, None on a worker that joins.
    `old_vote`: as for `Attempt`.

    Raises:
        SwitchError: a worker was lost before the vote's result was known, and the previous generation cannot continue
            without it; or any worker was lost after `release` had begun. Where the survivors agree on the new
            generation, `enter` still enters it.
        StateLostError: the vote failed after `release` had begun.
    """
    attempt, mode = Attempt(prepared, old_vote, latch, outcome.phases), prepared.mode
    has_begun = False
    try:
        values = _host_values(prepared, live, attempt, outcome)
        if live is not None:
            attempt.do("refresh", lambda: _refresh(prepared, live, settings.dump_dir))
        has_begun = mode.begin(attempt)
        if has_begun:
            outcome.report = attempt.talk(lambda: _migrate(prepared, outcome.phases))
            attempt.do("take_over", mode.take_over)
            attempt.do("load", lambda: host_values.load(values, prepared))
            outcome.is_committed = attempt.vote_to_commit(outcome.step)
    except RuntimeError as error:
        raise SwitchError(
            f"the switch to generation {prepared.generation.id} broke off before its vote: "
            f"{attempt.reason or one_line(error)}{mode.account()}"
        ) from error
    outcome.error, outcome.kind, outcome.last_sends = attempt.reason, attempt.kind, attempt.last_sends
    if outcome.is_committed:
        outcome.last_sends += tell_leavers(prepared)
        if prepared.next is None:
            wait_for_all(prepared)
        enter(prepared, outcome, settings)
    elif has_begun:
        mode.refused(prepared.generation.id, attempt)


def enter(prepared: PreparedGeneration, outcome: Switch, settings: Settings) -> None:
    """Enter the generation to which the migration is complete: its vote has succeeded, here or on another worker. This
    must not fail for any reason that concerns the job."""
    outcome.is_committed = True
    with outcome.phases.phase("swap"):
        _swap(prepared, settings)
    _tell(prepared, outcome)


def _host_values(
    prepared: PreparedGeneration, live: LiveGeneration | None, attempt: Attempt, outcome: Switch
) -> HostValues:
    values = attempt.talk(lambda: host_values.share(prepared, live, outcome.step, outcome.phases))
    if values is None:
        return NO_VALUES
    outcome.step = values.step
    if live is None:
        # A worker that joins has been waiting; its part of the stop begins when the others arrive.
        outcome.start = values.arrived
    if values.error:
        attempt.meet_known(values.error)
    return values


def _refresh(prepared: PreparedGeneration, live: LiveGeneration, dump_dir: str | None) -> None:
    """Read the state as the last step left it.

    Raises:
        EtcError: a tensor was added, removed or resharded since the preparation, or cannot be moved in its present
            form; or the script has frozen or unfrozen parameters since.
    """
    assert prepared.holdings is not None, "a worker of the old generation holds something"
    adapter = adapter_of(live.state)
    prepared.holdings.amendments.check_same(adapter.amendments(live.state))
    sources = adapter.held(live.state)
    if sources.keys() != prepared.holdings.tensors.keys():
        prepared.holdings.check_same_shards(Holdings.of(live.state))
    if prepared.old_stream is not None:
        shard, buffer = prepared.old_stream
        buffer.copy_(rng_state(live.parallel.device))
        sources[shard] = buffer
    sources |= prepared.holdings.rescued.tensors
    if prepared.mode.refresh(sources):
        prepared.holdings.check_same_shards(Holdings.of(live.state))
    if dump_dir is not None and prepared.crew.old_rank is not None:
        views = set(adapter.held(live.state)) - set(adapter.shards(live.state))
        state = {shard: tensor for shard, tensor in sources.items() if shard not in views}
        dump_shards(dump_dir, prepared.generation.id, "old", prepared.crew.old_rank, state)


def _migrate(prepared: PreparedGeneration, phases: Phases) -> MigrationReport:
    """Move the tensors.

    Raises:
        MigrationError: it failed here; other workers may still be waiting for this one.
    """
    shown = ProgressBar() if prepared.crew.worker == 0 else nullcontext()
    with phases.phase("migrate"), shown as bar:
        report = prepared.mode.migration.run(bar)
    phases.spans += report.spans
    return report


def _swap(prepared: PreparedGeneration, settings: Settings) -> None:
    """Put the new generation's groups, environment and random stream in force."""
    following = prepared.next
    if following is None:
        deactivate()
        return
    activate(following.world)
    adapter_of(following.state).enter(following.state)
    os.environ.update(generation_variables(prepared.generation, prepared.slot))
    targets = prepared.mode.migration.targets
    if prepared.new_stream is not None:
        set_rng_state(settings.device, targets[prepared.new_stream].cpu())
    else:
        start_stream(settings.seed, prepared.generation.id, following.parallel.rank)
    if settings.dump_dir is not None:
        with entered(following.world):
            shards = adapter_of(following.state).shards(following.state)
        if prepared.new_stream is not None:
            shards[prepared.new_stream] = rng_state(settings.device)
        dump_shards(settings.dump_dir, prepared.generation.id, "new", following.parallel.rank, shards)


def _tell(prepared: PreparedGeneration, outcome: Switch) -> None:
    """Log one line about the switch, on worker 0 only."""
    if prepared.crew.worker == 0:
        choice = prepared.choice
        _log.warning(
            "generation %d was migrated to in %s mode, since %s: %s bytes moved in %.0f ms",
            prepared.generation.id, choice.mode, choice.why, f"{prepared.moved_bytes:,}", outcome.phases.ms["migrate"],
        )


def write_switch_trace(folder: str, prepared: PreparedGeneration, outcome: Switch) -> None:
    """Write ``switch-<generation>-worker-<number>.json``, this worker's phases as a Chrome trace. Errors are only
    logged.
    """
    assert outcome.report is not None
    worker = prepared.crew.worker
    phases = outcome.phases
    whole = replace(outcome.report, seconds=sum(phases.ms.values()) / 1e3, spans=tuple(phases.spans))
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        write_trace(Path(folder) / f"switch-{prepared.generation.id}-worker-{worker}.json", {worker: whole})
    except (EtcError, OSError) as error:
        _log.warning("generation %d has no trace of its switch: %s", prepared.generation.id, one_line(error))
