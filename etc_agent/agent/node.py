"""One node's agent: a loop that compares what the job's records ask for with what runs here, and acts."""

from __future__ import annotations

import logging
import signal
import time
import uuid
from collections.abc import Collection
from pathlib import Path

from etc_agent.agent.acknowledging import Acknowledging
from etc_agent.agent.control_server import ControlServer
from etc_agent.agent.ending import End, Ending, Facts, end_of
from etc_agent.agent.etcd import Followed
from etc_agent.agent.inbox import ForWorkers, Inbox, Item, Preempted, Said, Signal
from etc_agent.agent.job_end import JobEnd
from etc_agent.agent.job_records import RecordReader
from etc_agent.agent.leadership import Leadership, policy_of
from etc_agent.agent.leaving import Leaving, SignalMeaning
from etc_agent.agent.own_record import OwnRecord
from etc_agent.agent.processes.deaths import DeathWatch
from etc_agent.agent.processes.local_workers import LocalWorkers
from etc_agent.agent.processes.logs import NodeLogs
from etc_agent.agent.processes.programs import Program
from etc_agent.agent.processes.starter import Starter
from etc_agent.agent.processes.torch_events import TorchEvents
from etc_agent.agent.safety.fence import Fence
from etc_agent.agent.safety.guardian import Guardian
from etc_agent.agent.safety.hangs import HangWatch
from etc_agent.agent.safety.peer_status import Speaker
from etc_agent.agent.safety.witness import Witness
from etc_agent.agent.settings import JobSettings
from etc_agent.agent.stores import Stores
from etc_agent.agent.telemetry.local import node_facts
from etc_agent.agent.telemetry.telemetry import Telemetry
from etc_agent.control.channel import SPARE_GENERATION, Channel
from etc_agent.control.messages import Hello, Message, Progress
from etc_agent.reconfig import member
from etc_agent.reconfig.fencing import Fencing
from etc_agent.reconfig.known import parts
from etc_agent.reconfig.known.observing import JobRecords
from etc_agent.reconfig.known.records import NodeRecord, NodeState, Outcome
from etc_agent.reconfig.known.surroundings import Surroundings
from etc_agent.reconfig.known.view import View, is_used, store_of, uncleared
from etc_agent.reconfig.loss.losses import suspense
from etc_agent.rendezvous.election import Election
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import EtcdError
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.membership import Membership
from etc_agent.rendezvous.mirror import Mirror

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_LEAVER_GRACE_S = 10.0
_UNDER_WAY_S = 10.0
"""Seconds for which no warm spares are started after workers were, so that these get the CPU, unless all have opened
their sessions."""


class NodeAgent:
    """The loop of one node. Its parts are passed in already started; `run` returns the exit code."""

    def __init__(
        self,
        settings: JobSettings,
        program: Program,
        record: NodeRecord,
        client: EtcdClient,
        keys: JobKeys,
        mirror: Mirror,
        membership: Membership,
        guardian: Guardian,
        inbox: Inbox,
        incarnation: str,
        run_folder: Path,
        logs: NodeLogs,
        events: TorchEvents,
        telemetry: Telemetry,
        stores: Stores,
        earlier_generation: int,
        leave_signals: Collection[int],
    ) -> None:
        self._incarnation = incarnation
        self._settings, self._name = settings, record.name
        self._own = OwnRecord(record, membership, mirror)
        self._client, self._keys, self._mirror, self._membership = client, keys, mirror, membership
        self._inbox, self._stores, self._guardian = inbox, stores, guardian
        self._witness = Witness(settings, record.name, guardian, client, keys)
        self._reader = RecordReader(keys)
        self._deaths = DeathWatch(inbox.changed)
        self._workers = LocalWorkers(record.name, guardian, self._deaths, leave_signals)
        self._hangs = HangWatch(settings.timeouts.hang_s)
        self._server = ControlServer(run_folder, self._said)
        self._starter = Starter(settings, program, record, logs, events, guardian, self._deaths, str(self._server.path))
        fencing = Fencing(settings.timeouts.lease_s)
        self._telemetry, self._followed = telemetry, Followed(membership, mirror, fencing.ttl_s)
        self._fence = Fence(
            fencing, self._followed, guardian, Speaker(incarnation, record.name), record.address, settings.port_range,
        )
        contact = f"{record.address}:{self._fence.port}"
        self._acknowledging = Acknowledging(record.name, client, keys, contact=contact, logs=logs.published)
        self._own.become(contact_port=self._fence.port)
        self._is_cut_off = False
        self._lost_up_to = earlier_generation
        self._leadership = Leadership(record.name, policy_of(settings), client, keys, self._workers)
        self._election: Election | None = None
        self._leaving = Leaving()
        self._alone_since = time.monotonic()
        self._is_stopping, self._why_stopping = False, ""
        self._logged_generation = 0
        self._logged_workers = -1
        self._logged_suspense = ""

    def run(self) -> JobEnd:
        """Take part in the job until it ends or this node has left."""
        timeout_s = 0.0
        while True:
            self._hear(self._inbox.take(min(timeout_s, _TICK_S)))
            records = self._reader.read(self._mirror.snapshot())
            self._heed_fence(records)
            self._workers.poll()
            self._heed_signals(records)
            self._hangs.look(self._workers.all())
            if records.incarnation not in ("", self._incarnation) and not self._is_stopping:
                run_id = self._settings.run_id
                self._stop_now(f"this job's run id {run_id!r} has been taken over by a later run; stopping")
            if self._name in records.drains and not self._leaving.has_deadline:
                asked_s = records.drains[self._name]
                limit_s = self._settings.timeouts.drain_s if asked_s is None else asked_s
                self._leaving.be_gone_by(time.monotonic(), limit_s)
            self._log_part(records)
            self._renew_store(records)
            self._clear(records)
            connected_s = min(self._mirror.connected_for_s, self._fence.followed_s)
            view = self._leadership.observe(records, connected_s, self._fence.alive_at)
            self._log_suspense(records, view)
            self._act(records, view)
            self._offer_spares()
            self._own.publish()
            self._witness.instruct(self._own.published.instance)
            if not self._fence.fell:
                self._acknowledging.write(records, self._workers.views(), self._lost_up_to)
            self._starter.keep_spares(self._idle_slots(records))
            timeout_s = self._lead(records, view)
            self._tell(records)
            if (end := self._ended(records)) is not None:
                return self._end(end, records)

    def close(self) -> None:
        """End every worker, give the lead back and close the control socket. Idempotent."""
        self._starter.spares.close()
        self._workers.stop_all(self._settings.timeouts.shutdown_grace_s)
        while self._workers.are_running:
            self._workers.poll()
            time.sleep(0.02)
        self._deaths.close()
        self._fence.close()
        if self._election is not None:
            self._election.close()
        self._server.close()
        if self._reader.read(self._mirror.snapshot()).current.outcome is Outcome.RUNNING:
            self._witness.testify(worker.process.pid for worker in self._workers.all())
        self._witness.dismiss()

    # ---- what comes in --------------------------------------------------------------------------------------------

    def _said(self, hello: Hello, channel: Channel, message: Message | None) -> None:
        """Called from the reader threads, since the loop may be waiting for etcd."""
        if isinstance(message, Progress):
            self._fence.saw_step(message.step)
        self._inbox.said(hello, channel, message)

    def _hear(self, items: list[Item]) -> None:
        for item in items:
            if isinstance(item, Said) and item.hello.generation == SPARE_GENERATION:
                self._starter.spares.receive(item.hello, item.channel, item.message)
            elif isinstance(item, Said):
                described = self._workers.receive(item.hello, item.channel, item.message)
                if described is not None:
                    self._leadership.learn(described)
            elif isinstance(item, Preempted):
                logger.info("the preemption probe says that this node will be taken away; handing over its state")
                grace_s = self._settings.preemption.grace_s if self._settings.preemption else None
                self._leaving.is_preempted = True
                self._leave(self._settings.timeouts.drain_s if grace_s is None else grace_s)
            elif isinstance(item, ForWorkers):
                logger.info("forwarding %s to the workers", signal.Signals(item.number).name)
                self._workers.send_signal(item.number)
            elif isinstance(item, Signal):
                self._handle_signal(item.number)
        if time.monotonic() >= self._leaving.deadline and not self._is_stopping:
            self._stop_now(f"the state was not handed over within {self._leaving.limit_s:g} s; stopping")

    def _handle_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        match self._leaving.take_signal(number, time.monotonic()):
            case SignalMeaning.LEAVE:
                self._workers.stop_signal = number
                what = "%s: this node leaves the job; its state is handed over first (again to stop at once)"
                logger.info(what, name)
                self._leave(self._settings.timeouts.drain_s)
            case SignalMeaning.STOP:
                self._workers.stop_signal = number
                self._stop_now(f"{name} again: stopping now", logging.WARNING)

    def _leave(self, limit_s: float) -> None:
        """Tell the other nodes that this node leaves, within `limit_s`."""
        self._leaving.be_gone_by(time.monotonic(), limit_s)
        self._own.become(state=NodeState.DRAINING)

    def _heed_signals(self, records: JobRecords) -> None:
        """If the signal to this node has ended workers too, their state is lost: the others start without this node."""
        if self._workers.heed_signals(is_leaving=self._is_leaving(records)):
            logger.warning("the signal to this node has ended workers; the others go on without their state")
            self._lost_up_to = records.current.next_id - 1
            self._workers.stop_all(self._settings.timeouts.shutdown_grace_s)

    def _stop_now(self, why: str, level: int = logging.ERROR) -> None:
        logger.log(level, "%s", why)
        self._why_stopping = why
        self._is_stopping = True
        self._workers.stop_all(self._settings.timeouts.shutdown_grace_s)

    def _put_fence(self, records: JobRecords, *, has_workers: bool) -> None:
        if not self._settings.standalone:  # with --standalone there never is another node
            self._fence.observe(Surroundings.of(self._name, records, has_workers=has_workers))

    def _heed_fence(self, records: JobRecords) -> None:
        """Where other nodes may have taken over this node's work, stop its workers and join again as a new node."""
        self._put_fence(records, has_workers=self._workers.are_running)
        if why := self._fence.fell:
            if not self._is_cut_off:
                logger.error("%s: its workers are stopped, and it joins again when etcd answers", why)
                self._is_cut_off = True
                self._lost_up_to = records.current.next_id - 1
                self._own.become(instance=uuid.uuid4().hex)
            self._workers.stop_all(0.0)
            if not self._workers.are_running:
                self._is_cut_off = False
                self._fence.lift()
        if self._membership.is_name_taken and not self._is_stopping:
            self._stop_now(f"another node has registered under the name {self._name} meanwhile; stopping")

    def _log_part(self, records: JobRecords) -> None:
        """Log one line when this node's part in the job has changed; the leader logs changes of the job."""
        committed = records.generations.get(records.current.committed)
        if committed is None or committed.id == self._logged_generation:
            return
        if records.current.outcome is not Outcome.RUNNING:
            return
        self._logged_generation = committed.id
        workers = len(parts.indices(self._name, committed))
        if workers == self._logged_workers:
            return
        self._logged_workers = workers
        what = f"{workers} of {committed.config.num_ranks} workers" if workers else "a waiting node, without workers"
        logger.info("%s is in generation %d: %s", self._name, committed.id, what)

    def _log_suspense(self, records: JobRecords, view: View) -> None:
        """Say what this node waits for while another one may be lost. If that is the leader's, nobody else says it."""
        what = suspense(view) if records.leader != self._name else ""
        if what and what != self._logged_suspense:
            logger.warning("%s", what)
            self._logged_suspense = what

    def _renew_store(self, records: JobRecords) -> None:
        """Open a new store when a fresh generation has used this node's: no other may meet there (`Stores`)."""
        if not is_used(store_of(self._own.now), records.generations):
            return
        known = (records.generations.get(g) for g in (records.current.committed, records.current.proposed))
        in_use = [int(generation.store.rpartition(":")[2]) for generation in known if generation is not None]
        self._own.become(store_port=self._stores.open(in_use))

    def _clear(self, records: JobRecords) -> None:
        """Publish when workers from before the last fresh start have ended here: other nodes wait for that."""
        cleared = member.cleared(records.current, records.generations, self._workers.views())
        if cleared != self._own.now.cleared:
            self._own.become(cleared=cleared)

    # ---- starting, stopping and telling workers ---------------------------------------------------------------------

    def _act(self, records: JobRecords, view: View) -> None:
        if self._is_stopping:
            return
        grace_s = self._settings.timeouts.shutdown_grace_s
        actions = member.owed(
            self._name, records.current, records.generations, self._workers.views(), self._lost_up_to,
            uncleared(view),
        )
        for action in sorted(actions, key=_is_slow):
            match action:
                case member.Start(index, generation, joining):
                    self._put_fence(records, has_workers=True)  # before the first worker starts
                    with self._guardian.starting():
                        process = self._starter.start(index, generation, records.current.restarts, joining=joining)
                        self._workers.add(index, generation.id, process)
                case member.Stop(index):
                    self._workers.stop(index, grace_s, after_s=self._last_checkpoint_s(index, records))
                case member.Expect(index):
                    self._workers.stop(index, grace_s, after_s=_LEAVER_GRACE_S)
                case member.Kill(index):
                    self._workers.kill(index)
                case member.Tell(index, generation_id, message):
                    self._workers.tell(index, generation_id, message)

        self._workers.kill_unfrozen(self._settings.timeouts.freeze_s)

    def _last_checkpoint_s(self, index: int, records: JobRecords) -> float:
        """The seconds that the worker in slot `index` may take to write a last checkpoint and end, which it is told
        here; 0 where the job asks for none."""
        checkpoint = self._settings.checkpoint
        if checkpoint is None or not checkpoint.on_stop_s or records.current.outcome is not Outcome.STOPPED:
            return 0.0
        return checkpoint.on_stop_s if self._workers.finish(index) else 0.0

    def _offer_spares(self) -> None:
        """Publish in which slots a worker can begin at once, before a failure is acknowledged for which that counts."""
        self._starter.fill(self._workers.vacant)
        if self._starter.warm_slots != self._own.now.spares:
            self._own.become(spares=self._starter.warm_slots)

    def _idle_slots(self, records: JobRecords) -> frozenset[int]:
        """The slots that should have a warm spare: those without a worker, once the workers have started. A spare in a
        slot that a new generation uses stays until it is taken: the workers of the one before have to end first."""
        if self._is_stopping or self._is_leaving(records):
            return frozenset()
        if records.current.outcome is not Outcome.RUNNING or not self._workers.are_under_way(_UNDER_WAY_S):
            return self._starter.spares.indices
        idle = parts.idle(self._name, self._settings.num_slots, records.current, records.generations)
        busy = {worker.slot.index for worker in self._workers.all() if worker.process.exit_code is None}
        reserve = self._starter.reserve if records.current.committed else frozenset()
        return idle | reserve | (self._starter.spares.indices - busy)

    # ---- the lead -------------------------------------------------------------------------------------------------

    def _lead(self, records: JobRecords, view: View) -> float:
        if self._is_stopping:
            return _TICK_S
        if self._leadership.may_lead(records, self._settings.timeouts.lease_s):
            if self._election is None:
                self._election = Election(
                    self._client, self._mirror, self._keys.leader, self._name,
                    lambda: self._membership.lease, lambda _: self._inbox.changed(),
                )
            return self._leadership.lead(self._election, records, view)
        if self._election is not None:
            self._election.resign()
            self._election = None
        return _TICK_S

    def _tell(self, records: JobRecords) -> None:
        """Show the outside what this node knows, where it was asked for."""
        name = self._name
        facts = node_facts(
            self._settings, name, self._workers, self._followed,
            num_spares=len(self._starter.spares.indices),
            is_leader=records.leader == name,
            is_leaving=self._is_leaving(records),
        )
        self._telemetry.observe(records, facts)

    # ---- the end --------------------------------------------------------------------------------------------------

    def _end(self, end: End, records: JobRecords) -> JobEnd:
        is_signalled = end.exit_code > 128 and bool(self._leaving.signals)
        generation = records.generations.get(records.current.committed)
        progress, goodput = self._workers.progress(), records.goodput
        steps = [progress.step if progress else None, goodput.step if goodput else None]
        return JobEnd(
            end.exit_code, records.current.why or end.why or self._why_stopping, end.exit_code - 128 if is_signalled
            else None, self._workers.failures(generation), self._workers.returned(generation), end.ending,
            end.start_again, max((step for step in steps if step is not None), default=None),
        )

    def _ended(self, records: JobRecords) -> End | None:
        now = time.monotonic()
        if self._workers.are_running or self._mirror.is_connected:
            self._alone_since = now
        if self._workers.are_running:
            return None
        name, current = self._name, records.current
        members = [records.generations.get(g) for g in (current.committed, current.proposed)]
        end = end_of(
            Facts(
                current,
                has_finished=self._has_finished(records),
                failed_with=self._workers.exit_code,
                is_member=any(generation is not None and name in generation.nodes for generation in members),
                is_alone=all(node.name == name for node in records.nodes),
                is_leader=records.leader == name,
                is_told_to_leave=self._is_leaving(records),
                is_taken_away=self._leaving.is_told,
                signals=tuple(self._leaving.signals),
                is_stopping=self._is_stopping,
                unheard_s=None if self._mirror.is_connected else now - self._alone_since,
                has_progressed=self._workers.have_progressed(self._settings.timeouts.start_s)
                or any(ack.has_stepped for (id_, _), ack in records.acks.items() if id_ == current.committed),
                is_below_min=len(records.nodes) < self._settings.min_nodes,
                is_stop_ordered=records.stop is not None,
            ),
            self._settings.timeouts,
        )
        if end is None:
            return None
        if end.why:
            logger.log(end.level, "%s", end.why)
        if end.ending is Ending.LEFT:
            self._forget_drain(records)
        return end

    def _has_finished(self, records: JobRecords) -> bool:
        """Whether this node has workers, and all of them have exited with code 0."""
        name, views = self._name, self._workers.views()
        for generation_id in (records.current.committed, records.current.proposed):
            generation = records.generations.get(generation_id)
            if generation is None or self._workers.were_stopped(parts.indices(name, generation)):
                continue
            if member.summarise(name, generation, records.generations, views, self._lost_up_to).finished:
                return True
        return False

    def _is_leaving(self, records: JobRecords) -> bool:
        return self._leaving.is_told or self._name in records.drains

    def _forget_drain(self, records: JobRecords) -> None:
        """Remove the drain request that this node has met, so that it does not apply to a later instance.

        Its record says from then on that it leaves: without either, it would be taken for a node that has just come.
        """
        if self._name in records.drains:
            self._own.become(state=NodeState.DRAINING)
            self._own.publish()
            try:
                self._client.delete(self._keys.drain(self._name))
            except EtcdError as error:
                logger.warning("control/drain/%s is done and could not be removed: %s", self._name, error)


def _is_slow(action: member.Action) -> bool:
    """Whether it takes milliseconds, for which the workers that run need not wait."""
    return isinstance(action, member.Start)
