"""This node's part of a generation, ``acks/<generation>/<node>``: how far its workers are."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from etc_agent.reconfig import member
from etc_agent.reconfig.known import parts
from etc_agent.reconfig.known.observing import JobRecords
from etc_agent.reconfig.known.records import Ack
from etc_agent.reconfig.known.worker_view import WorkerView
from etc_agent.reconfig.loss.freezing import frozen_here
from etc_agent.rendezvous.attempts import Attempts
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import EtcdError
from etc_agent.rendezvous.keys import JobKeys

logger = logging.getLogger(__name__)


class Acknowledging:
    """Writes an acknowledgement whenever it has changed. `contact`, `logs`: see `Ack`."""

    def __init__(self, name: str, client: EtcdClient, keys: JobKeys, *, contact: str, logs: str) -> None:
        self._name, self._client, self._keys = name, client, keys
        self._contact, self._logs = contact, logs
        self._written: dict[int, Ack] = {}
        self._attempts = Attempts()

    def write(self, records: JobRecords, views: Mapping[int, WorkerView], lost_up_to: int) -> None:
        """Bring etcd up to date with what this node's workers have done in the generations that count."""
        if not self._attempts.are_due(time.monotonic()):
            return
        current, generations = records.current, records.generations
        frozen = frozen_here(self._name, current, generations, views)
        for generation_id in (current.committed, current.proposed):
            generation = generations.get(generation_id)
            if generation is None or not parts.participants(self._name, generation, generations):
                continue
            summary = member.summarise(self._name, generation, generations, views, lost_up_to, frozen)
            ack = replace(summary, contact=self._contact, logs=self._logs)
            if ack == self._written.get(generation_id, Ack(generation_id, self._name)):
                continue
            try:
                self._client.put(self._keys.ack(generation_id, self._name), json.dumps(ack.to_json()))
                self._written[generation_id] = ack
                self._attempts.succeeded()
            except EtcdError as error:
                if self._attempts.failed(time.monotonic(), error):
                    logger.warning("an acknowledgement could not be written to etcd and is tried again: %s", error)
