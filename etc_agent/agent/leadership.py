"""The leader's part of an agent: builds the view, asks `reconfig` for a decision, and carries it out."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from etc_agent.agent.processes.local_workers import LocalWorkers
from etc_agent.agent.settings import JobSettings
from etc_agent.control import messages
from etc_agent.control.causes import ErrorKind
from etc_agent.errors import one_line
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.planner.errors import PlanError
from etc_agent.reconfig.fencing import Fencing
from etc_agent.reconfig.known.observing import JobRecords, Observer
from etc_agent.reconfig.known.parts import indices
from etc_agent.reconfig.known.records import Current, Outcome, Phase, Result
from etc_agent.reconfig.known.view import Describe, Foresee, Policy, View, Wait, Write
from etc_agent.reconfig.leader import decide
from etc_agent.reconfig.loss.outlook import Outlook
from etc_agent.reconfig.loss.survival import by_grid
from etc_agent.reconfig.past.account import Account
from etc_agent.reconfig.past.goodput import Goodput
from etc_agent.reconfig.past.tidy import Outdated, outdated
from etc_agent.reconfig.sizes.preview import preview
from etc_agent.rendezvous.attempts import Attempts
from etc_agent.rendezvous.election import Election, Mandate
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import EtcdError, FencedError
from etc_agent.rendezvous.etcd.values import Delete, DeletePrefix
from etc_agent.rendezvous.fenced import FencedWriter
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.state.encoding import decode_layout
from etc_agent.state.layout import Layout

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 30.0
_STATUS_S = 2.0
_LOOK_AGAIN_S = 1.0


class Leadership:
    """Runs in every agent, so that its times are right when the agent becomes the leader; acts only while it is."""

    def __init__(self, node: str, policy: Policy, client: EtcdClient, keys: JobKeys, workers: LocalWorkers) -> None:
        self._node, self._policy = node, policy
        self._client, self._keys, self._workers = client, keys, workers
        self._descriptions: dict[ParallelConfig, Layout | str] = {}
        self._undescribed: dict[ParallelConfig, tuple[str, float]] = {}
        self._asked: dict[ParallelConfig, float] = {}
        self._asked_of = (0, 0)
        self._foreseen_in = 0
        self._foreseen: dict[ParallelConfig, float] = {}
        self._writer: FencedWriter | None = None
        self._attempts = Attempts()
        self._mandate: Mandate | None = None
        self._observer = Observer()
        self._status: dict[str, object] = {}
        self._status_at = 0.0
        self._outlook: Outlook | None = None
        self._complaint = ""

    def observe(self, records: JobRecords, connected_s: float, alive_at: Mapping[str, float]) -> View:
        """The view at this moment; `connected_s` and `alive_at` as in `Observer.view`. Call it on every change, on the
        leader and on all others."""
        now = time.monotonic()
        self._observer = self._observer.observe(records, now)
        recent = {c: why for c, (why, at) in self._undescribed.items() if now - at < self._policy.retry_s}
        return self._observer.view(
            self._policy, records, self._descriptions, now, connected_s, alive_at, recent, time.time()
        )

    def may_lead(self, records: JobRecords, patience_s: float) -> bool:
        """Whether this node should stand for the lead; see `Observer.may_lead`."""
        return self._observer.may_lead(self._node, records, time.monotonic(), patience_s)

    def learn(self, described: messages.Described) -> None:
        """Take in a worker's answer to Describe. Only a layout and the model's own refusal are kept for good."""
        try:
            config = ParallelConfig.parse(described.config)
            layout = decode_layout(described.layout) if described.layout is not None else None
        except (ValueError, LookupError, TypeError) as error:
            logger.error("a worker's layout of %s is unreadable and ignored: %s", described.config, one_line(error))
            return
        if layout is None and described.kind is not ErrorKind.MODEL:
            logger.warning("no worker can tell the layout of config %s just now: %s", config, described.error)
            self._undescribed[config] = (described.error, time.monotonic())
            self._asked.pop(config, None)
        else:
            self._descriptions[config] = layout if layout is not None else described.error or "refused"

    def lead(self, election: Election, records: JobRecords, view: View) -> float:
        """Decide and act once. Returns in how many seconds to look again if nothing changes."""
        mandate = election.mandate
        if mandate is None:
            return float("inf")
        if not self._attempts.are_due(time.monotonic()):
            return _LOOK_AGAIN_S
        try:
            if self._writer is None or mandate != self._mandate:
                self._writer, self._mandate = FencedWriter(self._client, mandate, self._keys.current), mandate
            known = self._writer.current
            if (known.mod_revision if known else 0) != records.current_revision:
                return self._catch_up(records)
            match decide(view):
                case Wait(seconds, why):
                    return min(seconds, self._rest(records, view, why))
                case Foresee(configs, Wait(seconds, why)):
                    return min(seconds, self._rest(records, view, why), self._look_ahead(configs, records))
                case Describe(config):
                    return self._ask(config, records)
                case Write() as write:
                    self._execute(write, records)
                    return 0.0
        except PlanError as error:
            self._complain(logging.ERROR, f"no decision can be made, and training goes on as it is: {error}")
            return _ASK_AGAIN_S
        except FencedError as error:
            logger.info("a decision was not written to etcd and is made again: %s", error)
            self._writer = None
        except EtcdError as error:
            if self._attempts.failed(time.monotonic(), error):
                logger.warning("the leader cannot write to etcd; no decision takes effect until it can: %s", error)
            self._writer = None
        return _LOOK_AGAIN_S

    def _rest(self, records: JobRecords, view: View, why: str) -> float:
        """While nothing is to be decided: tell what is waited for, and answer the preview that is asked for. Returns in
        how many seconds to look again."""
        self._complain(logging.INFO, why)
        self._write_status(records, why)
        if records.preview is None:
            return float("inf")
        assert self._writer is not None
        answer = preview(view, records.preview)
        if isinstance(answer, Describe):
            return self._ask(answer.config, records)
        if answer is not None:
            self._writer.write({self._keys.preview_reply: json.dumps(answer.to_json())})
            self._has_written()
        return _LOOK_AGAIN_S

    def _has_written(self) -> None:
        if self._attempts.succeeded():
            logger.info("the leader can write to etcd again")

    def _complain(self, level: int, what: str) -> None:
        """Log `what`, unless it was the last thing logged."""
        if what and what != self._complaint:
            logger.log(level, what)
        self._complaint = what

    def _catch_up(self, records: JobRecords) -> float:
        """The mirror is older than this leader's own last write, or somebody else has written `current`."""
        assert self._writer is not None
        known = self._writer.current
        if known is None or known.mod_revision < records.current_revision:
            self._writer.reload()
        return 0.2

    def _ask(self, config: ParallelConfig, records: JobRecords) -> float:
        """Ask a worker for a layout, once: again when that is overdue, and when workers were lost, as the one that was
        asked may be among them."""
        now, workers = time.monotonic(), (records.current.committed, records.current.losses)
        if workers != self._asked_of:
            self._asked_of, self._asked = workers, {}
        if now - self._asked.get(config, -_ASK_AGAIN_S) >= _ASK_AGAIN_S:
            members = indices(self._node, records.generations[records.current.committed])
            if self._workers.ask(messages.Describe(str(config)), members):
                self._asked[config] = now
        return 1.0

    def _look_ahead(self, configs: tuple[ParallelConfig, ...], records: JobRecords) -> float:
        """Ask for the next of `configs` that was not asked for in this generation, when the one before is answered or
        overdue. Returns in how many seconds to come back."""
        committed, now = records.current.committed, time.monotonic()
        if committed != self._foreseen_in:
            self._foreseen_in, self._foreseen = committed, {}
        if any(config in configs and now - at < _ASK_AGAIN_S for config, at in self._foreseen.items()):
            return _LOOK_AGAIN_S
        unasked = [config for config in configs if config not in self._foreseen]
        if not unasked:
            return float("inf")
        self._foreseen[unasked[0]] = now
        return self._ask(unasked[0], records)

    def _execute(self, write: Write, records: JobRecords) -> None:
        puts = {self._keys.current: json.dumps(write.current.to_json())}
        if write.generation is not None:
            puts[self._keys.generation(write.generation.id)] = json.dumps(write.generation.to_json())
        if write.reply is not None:
            puts[self._keys.reply] = json.dumps(write.reply.to_json())
        if write.history is not None:
            history = replace(write.history, time=time.time())
            puts[self._keys.history(history.generation)] = json.dumps(history.to_json())
        for cordon in write.cordons:
            puts[self._keys.cordon(cordon.node, cordon.index)] = json.dumps(cordon.order.to_json())
        acked = {generation for generation, _ in records.acks}
        new = {write.generation.id: write.generation} if write.generation else {}
        old = outdated(write.current, {**records.generations, **new}, acked)
        if removed := [records.history[id_] for id_ in old.generations if id_ in records.history]:
            puts[self._keys.account] = json.dumps((records.account + Account.of(removed)).to_json())
        assert self._writer is not None
        self._writer.write(puts, self._deletes(old))
        self._has_written()
        _announce(write, records.current)

    def _deletes(self, old: Outdated) -> list[Delete | DeletePrefix]:
        return [
            *(DeletePrefix(self._keys.generation_acks_prefix(generation)) for generation in old.acks),
            *(Delete(self._keys.generation(generation)) for generation in old.generations),
            *(Delete(self._keys.history(generation)) for generation in old.generations),
        ]

    def _write_status(self, records: JobRecords, why: str) -> None:
        committed = records.generations.get(records.current.committed)
        if committed is None or time.monotonic() - self._status_at < _STATUS_S:
            return
        progress = self._workers.progress()
        goodput = records.goodput or Goodput(time.time())
        if progress is not None:
            goodput = goodput.at(time.time(), progress.generation, progress.step, progress.step_s)
        status: dict[str, object] = {
            "generation": committed.id,
            "config": str(committed.config),
            "phase": "held" if committed.is_held and not records.current.proposed else str(records.current.phase),
            "step": progress.step if progress else None,
            "num_steps": progress.num_steps if progress else None,
            "rate_steps_per_s": round(1 / progress.step_s, 3) if progress and progress.step_s > 0 else None,
            "workers": committed.config.num_ranks,
            "nodes": list(committed.nodes),
            "goodput": goodput.to_json(),
            "why": why,
            "survives": self._can_lose(committed, progress),
        }
        if status != self._status:
            assert self._writer is not None
            self._writer.write({self._keys.status: json.dumps({**status, "time": round(time.time(), 1)})})
            self._has_written()
            self._status, self._status_at = status, time.monotonic()

    def _can_lose(self, committed: Generation, progress: messages.Progress | None) -> dict[str, Any]:
        """What the job can lose now. Worked out once for each generation, when its layout gets known."""
        layout = self._descriptions.get(committed.config)
        if not isinstance(layout, tuple):
            return by_grid(committed).to_json()
        if self._outlook is None or self._outlook.generation.id != committed.id:
            self._outlook = Outlook.of(layout, committed, self._policy.redundancy)
        copied = progress.copied if progress is not None and progress.generation == committed.id else -1
        return self._outlook.to_json(copied if copied >= 0 else None)


def policy_of(settings: JobSettings) -> Policy:
    """What the leader needs to know of the settings."""
    timeouts = settings.timeouts
    return Policy(
        settings.min_nodes, settings.max_nodes, settings.num_slots,
        initial=settings.parallel,
        allowed=settings.allowed,
        refuse=settings.refusal,
        max_restarts=settings.max_restarts,
        alike_failures=settings.alike_failures,
        redundancy=settings.redundancy,
        replaces_raised=settings.failures.replaces_raised,
        max_per_window=settings.failures.max_per_window,
        window_s=settings.failures.window_s,
        pack=settings.pack,
        settle_s=timeouts.settle_s,
        prepare_s=timeouts.prepare_s,
        switch_s=timeouts.switch_s,
        start_s=timeouts.start_s,
        lost_s=Fencing(timeouts.lease_s).trust_s,
        fence_s=Fencing(timeouts.lease_s).fence_s,
        below_min_s=timeouts.join_s,
        retry_s=timeouts.retry_s,
    )


def _announce(write: Write, before: Current) -> None:
    """Log one line for people about a decision."""
    current, generation, history = write.current, write.generation, write.history
    for cordon in write.cordons:
        logger.error("%s is cordoned, since it %s; etc-ctl uncordon takes it back", cordon, cordon.order.why)
    if current.loss is not None and (before.loss is None or before.loss.number != current.loss.number):
        logger.error("loss %d: %s; the survivors stop and agree", current.loss.number, current.loss.why)
    if write.reply is not None and write.reply.result in (Result.REFUSED, Result.PENDING):
        logger.warning("request %r %s: %s", write.reply.request, write.reply.result, write.reply.message)
    if current.outcome is not Outcome.RUNNING:
        level = logging.INFO if current.outcome is Outcome.SUCCEEDED else logging.ERROR
        logger.log(level, "the job %s: %s", current.outcome, current.why)
    elif generation is not None:
        verb = "starts" if generation.is_fresh else "is prepared beside training"
        what = f"{generation.config} on {generation.config.num_ranks} workers"
        logger.info("generation %d, %s, %s (%s)", generation.id, what, verb, generation.reason)
    elif history is not None and history.outcome == "withdrawn":
        logger.warning("generation %d is withdrawn: %s", history.generation, history.why)
    elif history is not None and before.committed != current.committed:
        logger.info(
            "generation %d, %s, trains from step %d; %d workers kept, %d started, %d stopped, %.1f MB moved",
            history.generation, history.config, history.step, history.kept, history.started, history.stopped,
            history.moved_bytes / 1e6,
        )
    elif history is not None and history.stop_ms is not None:
        stopped = "generation %d: its first step ended %.0f ms after the last one before it"
        logger.info(stopped, history.generation, history.stop_ms)
    elif current.phase is Phase.ARMED:
        logger.debug("generation %d is armed", current.proposed)
