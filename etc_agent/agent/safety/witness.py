"""The agent's part of the testimony that its instance has no workers any more: the guardian gives it where the agent is
killed, the agent itself where it ends while the job continues."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from etc_agent.agent.safety.guardian import Guardian
from etc_agent.agent.safety.guardian_process import wait_for_end
from etc_agent.agent.safety.testimony import Case, testify
from etc_agent.agent.settings import JobSettings
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import EtcdError
from etc_agent.rendezvous.keys import JobKeys

logger = logging.getLogger(__name__)

_LIMIT_S = 2.0
"""Seconds that an agent that ends gives its own testimony."""


class Witness:
    """Of node `node`. Does nothing under ``--standalone``, where etcd ends too."""

    def __init__(self, settings: JobSettings, node: str, guardian: Guardian, client: EtcdClient, keys: JobKeys) -> None:
        self._settings, self._node = settings, node
        self._guardian, self._client, self._keys = guardian, client, keys
        self._instance = ""

    def instruct(self, instance: str) -> None:
        """Let the guardian testify for `instance`, the one of the node's record in etcd, should this agent be killed.
        Tried for ``timeouts.lease_s``: then the lease is over."""
        if self._settings.standalone or instance == self._instance:
            return
        settings, limit_s = self._settings, self._settings.timeouts.lease_s
        case = Case(settings.etcd, settings.run_id, self._node, instance, limit_s, settings.timeouts.etcd_s)
        self._guardian.testify(case.to_json(), limit_s)
        self._instance = instance

    def dismiss(self) -> str:
        """Nobody has to testify any more. Returns the instance for which the guardian would have."""
        instance, self._instance = self._instance, ""
        if instance:
            self._guardian.testify({}, 0.0)
        return instance

    def testify(self, groups: Iterable[int]) -> None:
        """This agent ends, and its workers, which led these process `groups`, have ended."""
        deadline = time.monotonic() + _LIMIT_S
        if (instance := self.dismiss()) and wait_for_end(set(groups), deadline):
            try:
                testify(self._client, self._keys, self._node, instance, deadline)
            except EtcdError as error:
                logger.warning("etcd does not answer, so the other nodes wait for this node's lease: %s", error)
