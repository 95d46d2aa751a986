"""What a job has in etcd, read into one value: every command looks at a job through this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from etc_agent.agent.job_records import RecordReader
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.observing import JobRecords
from etc_agent.reconfig.known.records import Ack, Current, History, NodeRecord, NodeState, Outcome, Reply
from etc_agent.reconfig.sizes.controls import Order, parse_pause
from etc_agent.rendezvous.etcd.client import MOST_READS, EtcdClient
from etc_agent.rendezvous.etcd.errors import EtcdError
from etc_agent.rendezvous.etcd.values import Get, GetPrefix, KeyValue
from etc_agent.rendezvous.keys import JobKeys
from launcher.ctl.exits import CtlError, Exit


class State(StrEnum):
    """What a job does now. `GONE`: it has not ended, and no node of it is here."""

    STARTING = "starting"
    RUNNING = "running"
    CHANGING = "changing"
    RECOVERING = "recovering"
    HELD = "held"
    GONE = "gone"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def has_ended(self) -> bool:
        return self in (State.SUCCEEDED, State.FAILED, State.STOPPED)


@dataclass(frozen=True, slots=True)
class Job:
    """One job at one moment.

    `rules`: the ``job`` record. `status`: what the leader says of the training; empty before it has. `reply`: its last
    answer to a request. `pause`: None where the job is not paused. `pause_mistake`: why ``control/pause`` is ignored,
    "" normally. `records` has the generations, with history and acknowledgements, that the present state needs.
    """

    run_id: str
    records: JobRecords
    rules: Mapping[str, Any] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    reply: Reply | None = None
    pause: Order | None = None
    pause_mistake: str = ""

    @property
    def current(self) -> Current:
        return self.records.current

    @property
    def committed(self) -> Generation | None:
        return self.records.generations.get(self.current.committed)

    @property
    def proposed(self) -> Generation | None:
        return self.records.generations.get(self.current.proposed) if self.current.proposed else None

    @property
    def nodes(self) -> tuple[NodeRecord, ...]:
        return tuple(sorted(self.records.nodes, key=lambda node: node.name))

    @property
    def state(self) -> State:
        if self.current.outcome is not Outcome.RUNNING:
            return State(self.current.outcome)
        if not self.records.nodes:
            return State.GONE
        if self.current.loss is not None:
            return State.RECOVERING
        if self.current.proposed:
            return State.CHANGING
        if not self.current.committed:
            return State.STARTING
        is_held = self.committed.is_held if self.committed is not None else self.status.get("phase") == "held"
        return State.HELD if is_held else State.RUNNING

    @property
    def max_restarts(self) -> int | None:
        """How many restarts after failures the job may make; None where its record does not say."""
        return self.rules.get("max_restarts")

    def ack(self, generation: Generation, node: str) -> Ack:
        return self.records.acks.get((generation.id, node)) or Ack(generation.id, node)

    def participants(self, proposed: Generation) -> tuple[str, ...]:
        """The nodes of the committed generation and of the one that is to replace it, each once."""
        return tuple(dict.fromkeys((*(self.committed.nodes if self.committed else ()), *proposed.nodes)))

    def is_draining(self, node: NodeRecord) -> bool:
        return node.state is NodeState.DRAINING or node.name in self.records.drains

    def ranks_by_slot(self) -> dict[Slot, int]:
        """Slot -> the virtual rank of the committed generation there."""
        return {slot: rank for rank, slot in enumerate(self.committed.placement)} if self.committed else {}

    def is_cordoned(self, slot: Slot) -> bool:
        return any(cordon.covers(slot) for cordon in self.records.cordons)

    @property
    def last_change(self) -> History | None:
        """The record of the committed generation."""
        return self.records.history.get(self.current.committed)


def read_job(client: EtcdClient, keys: JobKeys) -> Job:
    """The job as it is now, in two small requests, whatever it has stored of its past.

    Raises:
        CtlError: there is no such job any more.
        EtcdError: etcd does not answer, or a record of the leader cannot be read.
    """
    while True:
        first = client.read(_first_reads(keys)).reads
        entries = {kv.key: kv for read in first for kv in read}
        if not entries:
            raise CtlError(Exit.NOT_FOUND, f"job {keys.run_id} is not there any more")
        second = client.read([Get(keys.current), *_needed_by(current_of(entries, keys), keys)]).reads
        found = {kv.key: kv for read in second for kv in read}
        if _revision(found, keys.current) == _revision(entries, keys.current):
            return job_of({**entries, **found}, keys)


def read_jobs(client: EtcdClient, keys: Sequence[JobKeys]) -> Iterator[Job]:
    """Many jobs, a good many in each request. Of each: what `list` shows, without generations and acknowledgements."""
    per_request = MOST_READS // len(_list_reads(JobKeys("x")))
    for start in range(0, len(keys), per_request):
        batch = keys[start : start + per_request]
        reads = client.read([read for each in batch for read in _list_reads(each)]).reads
        size = len(reads) // len(batch)
        for index, each in enumerate(batch):
            yield job_of({kv.key: kv for read in reads[index * size : (index + 1) * size] for kv in read}, each)


def read_history(client: EtcdClient, keys: JobKeys) -> list[History]:
    """Every history record that is kept, by generation."""
    entries, _ = client.get_prefix(keys.history_prefix)
    return sorted((History.from_json(_object(entry)) for entry in entries), key=lambda record: record.generation)


def read_generations(client: EtcdClient, keys: JobKeys) -> list[Generation]:
    """Every generation that is kept, in order."""
    entries, _ = client.get_prefix(keys.generations_prefix)
    return sorted((Generation.from_json(_object(entry)) for entry in entries), key=lambda generation: generation.id)


def job_of(entries: Mapping[str, KeyValue], keys: JobKeys) -> Job:
    """The job from its keys, all or some of them."""
    records = RecordReader(keys).read(entries)
    pause, pause_mistake = None, ""
    if (item := entries.get(keys.pause)) is not None:
        try:
            pause = parse_pause(item.value.decode(errors="replace"))
        except ValueError as error:
            pause_mistake = f"control/pause: {error}"
    return Job(
        keys.run_id, records, _optional(entries, keys.job), _optional(entries, keys.status), reply_of(entries, keys),
        pause, pause_mistake,
    )


def current_of(entries: Mapping[str, KeyValue], keys: JobKeys) -> Current:
    """The leader's `current` record; the defaults where the job has not started."""
    item = entries.get(keys.current)
    return Current.from_json(_object(item)) if item else Current()


def reply_of(entries: Mapping[str, KeyValue], keys: JobKeys) -> Reply | None:
    """The leader's last answer to a request."""
    item = entries.get(keys.reply)
    return Reply.from_json(_object(item)) if item else None


def _first_reads(keys: JobKeys) -> list[Get | GetPrefix]:
    single = (keys.job, keys.leader, keys.current, keys.status, keys.account)
    return [*map(Get, single), GetPrefix(keys.nodes_prefix), GetPrefix(keys.control_prefix)]


def _list_reads(keys: JobKeys) -> list[Get | GetPrefix]:
    single = (keys.job, keys.leader, keys.current, keys.status, keys.pause)
    return [*map(Get, single), GetPrefix(keys.nodes_prefix)]


def _needed_by(current: Current, keys: JobKeys) -> list[Get | GetPrefix]:
    """What the present state needs of the generations, their acknowledgements and history."""
    reads: list[Get | GetPrefix] = []
    for generation in filter(None, (current.committed, current.proposed)):
        reads += [Get(keys.generation(generation)), Get(keys.history(generation))]
        reads.append(GetPrefix(keys.generation_acks_prefix(generation)))
    return reads


def _revision(entries: Mapping[str, KeyValue], key: str) -> int:
    return entries[key].mod_revision if key in entries else 0


def _optional(entries: Mapping[str, KeyValue], key: str) -> dict[str, Any]:
    return _object(entries[key]) if key in entries else {}


def _object(item: KeyValue) -> dict[str, Any]:
    value = item.json()
    if not isinstance(value, dict):
        raise EtcdError(f"the value of {item.key} is not a record of etc-run: {item.text[:80]!r}")
    return value
