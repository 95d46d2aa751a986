"""The job's keys, read from a mirror of etcd into the typed records that decisions are made from."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace

from etc_agent.parallel.generation import Generation
from etc_agent.reconfig.known.observing import JobRecords
from etc_agent.reconfig.known.records import Ack, Current, History, NodeRecord, Reply, Request, Testimony
from etc_agent.reconfig.past.account import Account
from etc_agent.reconfig.past.goodput import Goodput
from etc_agent.reconfig.sizes.controls import Cordon, Order, parse_cordon, parse_order, parse_pause
from etc_agent.rendezvous.etcd.values import KeyValue
from etc_agent.rendezvous.keys import JobKeys

logger = logging.getLogger(__name__)


class RecordReader:
    """Turns snapshots into `JobRecords`. Values that have not changed since the last snapshot are not parsed again."""

    def __init__(self, keys: JobKeys) -> None:
        self._keys = keys
        self._parsed: dict[tuple[str, int], object] = {}
        self._snapshot: Mapping[str, KeyValue] | None = None
        self._records = JobRecords()

    def read(self, snapshot: Mapping[str, KeyValue]) -> JobRecords:
        """The records in `snapshot` (key -> value). A value that cannot be parsed is logged and ignored."""
        if snapshot is not self._snapshot:
            self._snapshot, self._records = snapshot, self._read(snapshot)
        return self._records

    def _read(self, snapshot: Mapping[str, KeyValue]) -> JobRecords:
        keys, parsed = self._keys, {}
        nodes: list[NodeRecord] = []
        generations: dict[int, Generation] = {}
        acks: dict[tuple[int, str], Ack] = {}
        history: dict[int, History] = {}
        drains: dict[str, float | None] = {}
        cordons: list[Cordon] = []
        gone: dict[str, Testimony] = {}
        for key, item in snapshot.items():
            identity = (key, item.mod_revision)
            record = self._parsed[identity] if identity in self._parsed else self._parse(item)
            parsed[identity] = record
            if isinstance(record, NodeRecord):
                nodes.append(record)
            elif isinstance(record, Generation):
                generations[record.id] = record
            elif isinstance(record, Ack):
                acks[record.generation, record.node] = record
            elif isinstance(record, Cordon):
                cordons.append(record)
            elif isinstance(record, History):
                history[record.generation] = record
            elif isinstance(record, Testimony):
                gone[key.removeprefix(keys.gone_prefix)] = record
            elif key.startswith(keys.drains_prefix):
                drains[key.removeprefix(keys.drains_prefix)] = _seconds(item.value)
        self._parsed = parsed
        current, scale = snapshot.get(keys.current), snapshot.get(keys.scale)

        def at(key: str) -> object:
            item = snapshot.get(key)
            return parsed.get((key, item.mod_revision)) if item else None

        record, account, goodput, reply = at(keys.current), at(keys.account), at(keys.status), at(keys.reply)
        leader = snapshot.get(keys.leader)
        stop = snapshot.get(keys.stop)
        incarnation = at(keys.job)
        return JobRecords(
            incarnation=incarnation if isinstance(incarnation, str) else "",
            nodes=tuple(nodes),
            leader=leader.value.decode(errors="replace") if leader else "",
            current=record if isinstance(record, Current) else Current(),
            current_revision=current.mod_revision if current else 0,
            generations=generations,
            acks=acks,
            scale=Request(scale.value.decode(errors="replace"), scale.mod_revision) if scale else None,
            drains=drains,
            paused=isinstance(at(keys.pause), Order),
            cordons=tuple(cordons),
            preview=_open_preview(snapshot.get(keys.preview), at(keys.preview_reply)),
            stop=parse_order(stop.value.decode(errors="replace")) if stop else None,
            reply=reply if isinstance(reply, Reply) else None,
            history=history,
            account=account if isinstance(account, Account) else Account(),
            goodput=goodput if isinstance(goodput, Goodput) else None,
            gone=gone,
        )

    def _parse(self, item: KeyValue) -> object:
        keys = self._keys
        try:
            if item.key == keys.job:
                return str(json.loads(item.value)["incarnation"])
            if item.key == keys.current:
                return Current.from_json(json.loads(item.value))
            if item.key.startswith(keys.nodes_prefix):
                record = NodeRecord.from_json(json.loads(item.value))
                return replace(record, joined=item.create_revision)
            if item.key.startswith(keys.generations_prefix):
                return Generation.from_json(json.loads(item.value))
            if item.key.startswith(keys.acks_prefix):
                return Ack.from_json(json.loads(item.value))
            if item.key.startswith(keys.cordons_prefix):
                return parse_cordon(item.key.removeprefix(keys.cordons_prefix), item.value.decode(errors="replace"))
            if item.key == keys.preview_reply:
                return int(json.loads(item.value)["revision"])
            if item.key == keys.pause:
                return parse_pause(item.value.decode(errors="replace"))
            if item.key.startswith(keys.history_prefix):
                return History.from_json(json.loads(item.value))
            if item.key == keys.reply:
                return Reply.from_json(json.loads(item.value))
            if item.key == keys.account:
                return Account.from_json(json.loads(item.value))
            if item.key == keys.status and (goodput := json.loads(item.value).get("goodput")):
                return Goodput.from_json(goodput)
            if item.key.startswith(keys.gone_prefix):
                return Testimony.from_json(json.loads(item.value))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("etcd key %s cannot be read as a record of etc-run and is ignored: %s", item.key, error)
        return None


def _open_preview(asked: KeyValue | None, answered: object) -> Request | None:
    """The preview that is asked for, unless the last answer is to it."""
    if asked is None or answered == asked.mod_revision:
        return None
    return Request(asked.value.decode(errors="replace"), asked.mod_revision)


def _seconds(value: bytes) -> float | None:
    try:
        return max(0.0, float(value))
    except ValueError:
        return None

