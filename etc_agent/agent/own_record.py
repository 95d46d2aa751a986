"""This node's record, ``nodes/<node>``: what the other nodes know of it."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from typing import Any

from etc_agent.reconfig.known.records import NodeRecord
from etc_agent.rendezvous.attempts import Attempts
from etc_agent.rendezvous.etcd.errors import EtcdError
from etc_agent.rendezvous.membership import Membership
from etc_agent.rendezvous.mirror import Mirror

logger = logging.getLogger(__name__)


class OwnRecord:
    """The record as it should be (`now`) and as it was last written (`published`)."""

    def __init__(self, record: NodeRecord, membership: Membership, mirror: Mirror) -> None:
        self.now = record
        self.published = record
        self._membership, self._mirror = membership, mirror
        self._attempts, self._is_news = Attempts(), False

    def become(self, **changes: Any) -> None:
        """Change these fields of the record; `publish` writes it to etcd."""
        self.now = replace(self.now, **changes)
        self._is_news = True

    def publish(self) -> None:
        """Write the record to etcd: at once, or, if etcd does not answer, when it does again."""
        if self.now == self.published or not (self._is_news or self._mirror.is_connected):
            return
        if not self._attempts.are_due(time.monotonic()):
            return
        try:
            self._membership.update(json.dumps(self.now.to_json()))
            self.published = self.now
            self._attempts.succeeded()
        except EtcdError as error:
            if self._attempts.failed(time.monotonic(), error):
                logger.warning("this node's record could not be written to etcd and will be when it answers: %s", error)
        self._is_news = False
