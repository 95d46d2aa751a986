"""The switch: at a safe point, from the previous generation to the prepared one. Training stands still here.

    host state from old rank 0 -> migrate -> vote: the commit point -> swap

Until the vote nothing of the previous generation is touched, so a failed vote costs only the time, and so does the loss
of a worker that joins (`settling`). After it every worker is in the new generation, and those that leave go once every
other worker has seen the vote succeed. In `release` mode a vote of its own comes before the migration, after which
there is no way back.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from etc_agent.control.causes import ErrorKind, kind_of
from etc_agent.control.environment import generation_variables
from etc_agent.errors import EtcError, PeerLostError
from etc_agent.integrations.aliases import local_tensor
from etc_agent.integrations.native import held_shards, host_state, load_host_state, rng_state, set_rng_state, shards_of
from etc_agent.integrations.tensors import all_tensors, shard_of
from etc_agent.migration.progress import ProgressBar
from etc_agent.migration.release import ReleasingMigration
from etc_agent.migration.report import MemoryPoint, MigrationReport, Span
from etc_agent.migration.trace import write_trace
from etc_agent.worker.change.exchange import broadcast_json, gather_json
from etc_agent.worker.change.prepare import PreparedGeneration, one_line
from etc_agent.worker.change.releasing import StateLostError, take_over, what_is_lost
from etc_agent.worker.change.rng import start_stream
from etc_agent.worker.change.settling import Settlement
from etc_agent.worker.change.user_state import load_own_state, own_state, rules_of
from etc_agent.worker.change.verify import write_shards
from etc_agent.worker.live import LiveGeneration
from etc_agent.worker.settings import Settings
from etc_agent.worker.world.swap import activate, deactivate, entered

_log = logging.getLogger(__name__)


_DONE_TAG = 1


class SwitchError(PeerLostError):
    """A worker was lost while the job changed. Whether the others switched is not known here."""


@dataclass(slots=True, eq=False)
class Switch:
    """What came of a switch. `is_committed`: the new generation is in force; else the old one still is.

    `start`: when this worker knew the switch had begun (`time.perf_counter`); `step`: the first of the new generation.
    `farewells`: sends to the workers that leave, to be waited for before the group goes. `error`: why this worker
    voted against, "" where it did not; `kind`: of that error, or of the others that there must be. `spans`: the phases
    and, inside them, those of the migration.
    """

    is_committed: bool
    step: int
    start: float
    phases_ms: dict[str, float] = field(default_factory=dict)
    sent_bytes: int = 0
    received_bytes: int = 0
    referred_bytes: int = 0
    farewells: list[dist.Work] = field(default_factory=list)
    error: str = ""
    kind: ErrorKind = ErrorKind.PEER_LOST
    spans: list[Span] = field(default_factory=list)
    timeline: tuple[MemoryPoint, ...] = ()


def switch(
    prepared: PreparedGeneration,
    live: LiveGeneration | None,
    step: int,
    settings: Settings,
) -> Switch:
    """Move into `prepared`; `live` is None on a worker that joins, `step` the next step on one that does not.

    Raises:
        SwitchError: a worker without which the previous generation cannot go on was lost before the vote's result was
            known; or any worker, and there is no way back (`release` mode).
        StateLostError: the vote failed, and there is no way back.
    """
    outcome = Switch(False, step, time.perf_counter())
    settlement = Settlement(prepared, live)
    is_releasing = isinstance(prepared.migration, ReleasingMigration)
    may_run = True
    try:
        host = settlement.attempt(lambda: _share_host_state(prepared, live, outcome))
        is_known_to_all = host is not None and bool(host.error)
        ok = host is not None and not host.error
        ok = ok and (live is None or _refresh(prepared, live, outcome, settings.verify_dir))
        if is_releasing:
            # Nothing is given up before every worker is known to be there and fit.
            with _phase(outcome, "begin"):
                ok = may_run = settlement.agree(ok)
        if host is not None and ok:
            ok = settlement.attempt(lambda: _migrate(prepared, host, outcome)) or False
        elif may_run and not is_known_to_all:
            settlement.give_up(outcome.error)
        if may_run:
            with _phase(outcome, "vote"):
                outcome.is_committed = settlement.settle(ok)
    except RuntimeError as error:
        why, lost = settlement.error or one_line(error), settlement.lost or what_is_lost(prepared)
        raise SwitchError(
            f"the switch to generation {prepared.generation.id} broke off before its vote: {why}{lost}"
        ) from error
    outcome.error = outcome.error or settlement.error
    outcome.farewells += settlement.farewells
    if outcome.is_committed:
        with _phase(outcome, "swap"):
            _swap(prepared, outcome, settings)
        _tell(prepared, outcome)
    elif is_releasing and may_run:
        raise _no_way_back(prepared, outcome, settlement)
    return outcome


def _no_way_back(prepared: PreparedGeneration, outcome: Switch, settlement: Settlement) -> EtcError:
    reason = outcome.error or "the migration failed on another worker"
    lost = settlement.lost or what_is_lost(prepared) or "; release mode had begun, and others have given up state"
    kind = SwitchError if settlement.error else StateLostError
    return kind(f"the switch to generation {prepared.generation.id} failed: {reason}{lost}")


def _tell(prepared: PreparedGeneration, outcome: Switch) -> None:
    """One line for people, in worker 0's log."""
    if prepared.crew.worker == 0:
        choice = prepared.choice
        _log.warning(
            "generation %d was migrated to in %s mode, since %s: %s bytes moved in %.0f ms",
            prepared.generation.id, choice.mode, choice.why, f"{prepared.moved_bytes:,}", outcome.phases_ms["migrate"],
        )


def write_switch_trace(folder: str, prepared: PreparedGeneration, outcome: Switch) -> None:
    """Write ``switch-<generation>-worker-<number>.json``: this worker's phases. Failure is logged only."""
    worker = prepared.crew.worker
    account = MigrationReport(
        sum(outcome.phases_ms.values()) / 1e3, outcome.sent_bytes, outcome.received_bytes, outcome.referred_bytes,
        len(prepared.plan.rounds), tuple(outcome.spans), outcome.timeline,
    )
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        write_trace(Path(folder) / f"switch-{prepared.generation.id}-worker-{worker}.json", {worker: account})
    except (EtcError, OSError) as error:
        _log.warning("generation %d has no trace of its switch: %s", prepared.generation.id, one_line(error))


@dataclass(frozen=True, slots=True)
class _HostState:
    """The state that is not tensors, the same value on every worker: `shared` is old rank 0's, `own` each old rank's.
    `error`: why one of them could not be read from the script's objects, "" where all could; every worker then votes
    the change down, and none waits for another."""

    shared: dict[str, Any]
    own: list[dict[str, Any]]
    error: str


def _share_host_state(prepared: PreparedGeneration, live: LiveGeneration | None, outcome: Switch) -> _HostState:
    """Exchange the host state.

    Raises:
        RuntimeError: a worker was lost.
    """
    # A worker that joins has been waiting in this broadcast; its stop begins when the old rank 0 arrives.
    value = None
    if live is not None:
        with _phase(outcome, "host_state"):
            if prepared.crew.worker == 0:
                has_own = set(rules_of(live.state).values()) - {"replicated"}
                value = {"step": outcome.step, "has_own": bool(has_own), **_read(lambda: host_state(live.state))}
            value = broadcast_json(prepared.group, 0, value)
    else:
        value = broadcast_json(prepared.group, 0, None)
        outcome.start = time.perf_counter()
    outcome.step = value["step"]
    own: list[dict[str, Any]] = []
    if value["has_own"]:
        with _phase(outcome, "own_state"):
            said = {} if live is None else _read(lambda: own_state(live.state))
            own = gather_json(prepared.group, said)[: prepared.previous.config.num_ranks]
    outcome.error = next((said["error"] for said in (value, *own) if said["error"]), "")
    if outcome.error:
        outcome.kind = ErrorKind.RAISED
        _log.error("generation %d: the state cannot be shared: %s", prepared.generation.id, outcome.error)
    return _HostState(value["state"], [said["state"] for said in own], outcome.error)


def _read(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `read` returns, or the error that the script's `state_dict` raises: it is told to every worker."""
    try:
        return {"state": read(), "error": ""}
    except Exception as error:
        _log.warning("the script's state cannot be read", exc_info=True)
        return {"state": {}, "error": one_line(error)}


def _migrate(prepared: PreparedGeneration, host: _HostState, outcome: Switch) -> bool:
    """Move the tensors; whether that went well here. One that cannot use what came says so in the vote that follows.

    Raises:
        MigrationError: a worker was lost, so that others may wait for this one.
    """
    shown = ProgressBar() if prepared.crew.worker == 0 else nullcontext()
    with _phase(outcome, "migrate"), shown as bar:
        report = prepared.migration.run(bar)
    try:
        if isinstance(prepared.migration, ReleasingMigration):
            with _phase(outcome, "take over"):
                take_over(prepared)
        with _phase(outcome, "load"):
            if prepared.next is not None:
                load_host_state(prepared.next.state, host.shared)
                _load_own(prepared, prepared.next, host.own)
    except Exception as error:
        return _failed(prepared, outcome, error)
    outcome.sent_bytes, outcome.received_bytes = report.sent_bytes, report.received_bytes
    outcome.referred_bytes = report.referred_bytes
    outcome.spans += report.spans
    outcome.timeline = report.timeline
    return True


def _failed(prepared: PreparedGeneration, outcome: Switch, error: Exception) -> bool:
    outcome.error, outcome.kind = one_line(error), kind_of(error)
    _log.error("generation %d: migration failed: %s", prepared.generation.id, outcome.error, exc_info=True)
    return False


def _load_own(prepared: PreparedGeneration, following: LiveGeneration, own: list[dict[str, Any]]) -> None:
    if own:
        previous, config = prepared.previous.config, prepared.generation.config
        load_own_state(following.state, own, previous, config, following.parallel.rank)


def _refresh(
    prepared: PreparedGeneration, live: LiveGeneration, outcome: Switch, verify_dir: str | None
) -> bool:
    """Take the state as the last step left it; whether that went well."""
    try:
        with _phase(outcome, "refresh"):
            _take_sources(prepared, live, verify_dir)
    except Exception as error:
        return _failed(prepared, outcome, error)
    return True


def _take_sources(prepared: PreparedGeneration, live: LiveGeneration, verify_dir: str | None) -> None:
    """The optimizer may have replaced tensors since the preparation."""
    sources = {
        prepared.old_shards.get(name) or shard_of(name, tensor): local_tensor(tensor)
        for name, tensor in all_tensors(live.state).items()
    }
    if prepared.old_stream is not None:
        shard, buffer = prepared.old_stream
        buffer.copy_(rng_state(live.parallel.device))
        sources[shard] = buffer
    prepared.migration.refresh(sources)
    if verify_dir is not None and prepared.crew.old_rank is not None:
        views = set(held_shards(live.state)) - set(shards_of(live.state))
        state = {shard: tensor for shard, tensor in sources.items() if shard not in views}
        write_shards(verify_dir, prepared.generation.id, "old", prepared.crew.old_rank, state)


def _swap(prepared: PreparedGeneration, outcome: Switch, settings: Settings) -> None:
    """The vote has succeeded: nothing in here may fail for reasons of the job."""
    _say_farewell(prepared, outcome)
    following = prepared.next
    if following is None:
        deactivate()
        return
    activate(following.world)
    os.environ.update(generation_variables(prepared.generation, prepared.slot))
    if prepared.new_stream is not None:
        set_rng_state(settings.device, prepared.new_stream[1])
    else:
        start_stream(settings.seed, prepared.generation.id, following.parallel.rank)
    if settings.verify_dir is not None:
        with entered(following.world):
            shards = shards_of(following.state)
        if prepared.new_stream is not None:
            shards[prepared.new_stream[0]] = rng_state(settings.device)
        write_shards(settings.verify_dir, prepared.generation.id, "new", following.parallel.rank, shards)


def _say_farewell(prepared: PreparedGeneration, outcome: Switch) -> None:
    """Tell each worker that leaves that this one has seen the vote; one that leaves waits for all the others.

    A process that exits earlier could take the vote's last messages with it.
    """
    worker, group = prepared.crew.worker, prepared.group
    byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
    for leaver in prepared.crew.leaving:
        if leaver != worker:
            outcome.farewells.append(group.send([byte], leaver, _DONE_TAG))
    if prepared.next is None:
        _await_farewells(prepared)


def _await_farewells(prepared: PreparedGeneration) -> None:
    group = prepared.group
    others = [other for other in range(prepared.crew.num_workers) if other != prepared.crew.worker]
    works = [group.recv([torch.zeros(1, dtype=torch.uint8, device="cpu")], other, _DONE_TAG) for other in others]
    for other, work in zip(others, works, strict=True):
        try:
            work.wait()
        except RuntimeError as error:
            # It has seen the vote or is dead; either way it needs nothing more from here.
            _log.info("worker %d went before saying so: %s", other, one_line(error))


@contextmanager
def _phase(outcome: Switch, name: str) -> Iterator[None]:
    began_s, start = time.time(), time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    outcome.phases_ms[name] = seconds * 1e3
    outcome.spans.append(Span(name, began_s, seconds))
